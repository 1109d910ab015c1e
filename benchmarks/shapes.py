"""Calls of any shape: what a new shape costs, and what a mixture of lengths and `generate` cost.

    python -m benchmarks.shapes

Claims: a new shape of a known family takes less than 50 ms before its first kernel, and less than
50 us after; training on 7 lengths in turns takes at most 1.15 of the time at one length; a step of
`generate` with a growing cache takes at most 1.05 of one whose shape was planned by itself.
"""

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import baechi
from baechi.tracing.calling_convention import canonical_call

DEVICES = {"cpu:0": "4GiB", "cpu:1": "4GiB"}
LENGTHS = (24, 32, 40, 48, 56, 64, 72)


def gpt2(layers: int) -> nn.Module:
    """A GPT-2 of width 128 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes: Any = {"n_layer": layers, "n_embd": 128, "n_head": 4, "vocab_size": 512} | drops
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def llama(layers: int) -> nn.Module:
    """A Llama of width 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 352}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def swin() -> nn.Module:
    """A Swin of four stages of two layers, of width 16 at first."""
    from transformers import SwinConfig, SwinModel

    torch.manual_seed(0)
    return SwinModel(SwinConfig(embed_dim=16, depths=[2] * 4, num_heads=[1] * 4)).eval()


def placed(model: nn.Module, **options: Any) -> Any:
    """The model, cut in the middle at least."""
    given = {"costs": "estimate", "progress": False, "placer": "round-robin", **options}
    return baechi.place(copy.deepcopy(model), DEVICES, **given)


def seconds(work: Callable[[], Any]) -> float:
    """Wall time."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def new_shape(layers: int) -> tuple[float, float]:
    """Seconds until the plan of a new shape is found, the first time and later."""
    module = placed(gpt2(layers).train(), max_shapes=4)
    ids = [torch.randint(3, 500, (4, n)) for n in LENGTHS]
    for batch in ids[:2]:
        module(batch, use_cache=False)
    state = vars(module)["_baechi_placed"]
    first, later = [], []
    for batch in ids[2:]:
        call = canonical_call(state.model, (batch,), {"use_cache": False})
        first.append(seconds(partial(state.special, state.root, call)))
        later += [seconds(partial(state.root.specializations.find, call)) for _ in range(20)]
    module.unplace()
    return statistics.median(first), statistics.median(later)


def family(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Seconds that the first call takes, and the first of another size, which plans for all."""
    module = placed(model, training=model.training)
    with torch.set_grad_enabled(model.training):
        took = seconds(partial(module, one)), seconds(partial(module, other))
    module.unplace()
    return took


def mixture(layers: int, rounds: int = 7) -> tuple[float, float, float]:
    """The time of training on 7 lengths in turns: of a family, over its own at one length and over
    a plan for each length; and of the unsplit model, over its own at one length.

    Times are of processors, and each length's is a median. By the wall other processes count, and
    not alike: a plan that waited for its turn has workers that rested, which the system runs first.
    """
    model = gpt2(layers).train()
    modules = placed(model), placed(model, dynamic=False), model
    batches = [torch.randint(3, 500, (4, n)) for n in LENGTHS]

    def run(module: Any, batch: torch.Tensor) -> float:
        start = time.process_time()
        module(batch, labels=batch, use_cache=False).loss.backward()
        return time.process_time() - start

    for module in modules:
        for batch in batches:
            run(module, batch)
    mixed: list[list[list[float]]] = [[[] for _ in batches] for _ in modules]
    alone: list[list[list[float]]] = [[[] for _ in batches] for _ in modules]
    for _ in range(rounds):
        for number, batch in enumerate(batches):
            for module, rows in zip(modules, mixed, strict=True):
                rows[number].append(run(module, batch))
        for number, batch in enumerate(batches):
            for module, rows in zip(modules, alone, strict=True):
                rows[number].append([run(module, batch) for _ in range(2)][1])
    (family, own, eager), (one, _, eager_one) = (
        [sum(map(statistics.median, rows)) for rows in way] for way in (mixed, alone)
    )
    return family / one, family / own, eager / eager_one


def generation(tokens: int) -> tuple[float, int]:
    """The time of a step with the growing cache over one at a shape of its own; and the plans."""
    model = gpt2(4).eval()
    module, ids = placed(model, training=False), torch.randint(3, 500, (2, 8))
    given = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}
    with torch.no_grad():
        expected = model.generate(ids, **given)
        assert torch.equal(module.generate(ids, **given), expected)
        n = len(module._specializations)
        step = model(expected[:, :100]).past_key_values
        fixed = placed(model, training=False, dynamic=False)
        modules, ratios = (module, fixed), []
        for _ in range(40):
            caches = [copy.deepcopy(step) for _ in modules]
            one, two = (
                seconds(lambda m=m, c=c: m(ids[:, :1], past_key_values=c, use_cache=True))
                for m, c in zip(modules, caches, strict=True)
            )
            ratios.append(one / two)
    return statistics.median(ratios[5:]), n


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    first, later = new_shape(12)
    print(f"a new shape, 12 layers, the first time   {first * 1e3:8.1f} ms")
    print(f"the same shape later                     {later * 1e6:8.1f} us")
    lengths = (torch.randint(3, 500, (4, n)) for n in LENGTHS[:2])
    sizes = (torch.randn(1, 3, n, n) for n in (256, 288))
    for what, times in (
        ("a second length, 12 layers", family(gpt2(12).train(), *lengths)),
        ("a second size of images, a Swin", family(swin(), *sizes)),
    ):
        print(f"{what:41}{times[1]:8.1f} s, the first {times[0]:.1f}")
    one, own, eager = mixture(4)
    print(f"7 lengths in turns / at one length       {one:8.2f}, unsplit {eager:.2f}")
    print(f"7 lengths in turns / with a plan each    {own:8.2f}")
    ratio, n = generation(200)
    print(f"a step of generate / its own plan        {ratio:8.2f}")
    print(f"plans for 200 tokens                     {n:8d}")


if __name__ == "__main__":
    main()
