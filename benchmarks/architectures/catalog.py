"""Every architecture by its name."""

import torch
from benchmarks.architectures.audio import AUDIO
from benchmarks.architectures.found import PREFIX, folders, found
from benchmarks.architectures.multimodal import MULTIMODAL
from benchmarks.architectures.plain import PLAIN
from benchmarks.architectures.series import SERIES
from benchmarks.architectures.small import Example, small
from benchmarks.architectures.text import BOTH, DECODERS, ENCODERS
from benchmarks.architectures.vision import VISION
from benchmarks.architectures.vision_language import VISION_LANGUAGE

FAMILIES = {
    "encoder": ENCODERS,
    "decoder": DECODERS,
    "encoder-decoder": BOTH,
    "vision": VISION,
    "audio": AUDIO,
    "multimodal": MULTIMODAL,
    "vision-language": VISION_LANGUAGE,
    "time series": SERIES,
}


def example(name: str, *, dropout: bool = False, cache: bool = False) -> Example:
    """A model in training mode with arguments for it; `small` has the options."""
    torch.manual_seed(0)
    if name.startswith(PREFIX):
        return found(name.removeprefix(PREFIX))
    if name in PLAIN:
        model, args, kwargs = PLAIN[name]()
        return model.train(), args, kwargs
    for rows in FAMILIES.values():
        if name in rows:
            own, arguments, *parts = rows[name]
            model = small(name, own, parts[0] if parts else {}, dropout=dropout, cache=cache)
            return model.train(), (), arguments()
    raise KeyError(name)


def family(name: str) -> str:
    """Which table the name is in."""
    if name.startswith(PREFIX):
        return "found"
    return next((title for title, rows in FAMILIES.items() if name in rows), "plain torch")


def names() -> list[str]:
    """All of them, in the order of the tables."""
    return [*PLAIN, *(name for rows in FAMILIES.values() for name in rows)]


def names_found() -> list[str]:
    """A name for each folder of `transformers` of which the tables have no class."""
    import transformers

    rows = [name for rows in FAMILIES.values() for name in rows]
    known = {getattr(transformers, name).__module__.split(".")[2] for name in rows}
    return [f"{PREFIX}{folder}" for folder in folders() if folder not in known]
