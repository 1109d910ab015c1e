"""Which models there are, and on what they run: what needs no torch."""

from typing import Final

KIND: Final = "A100-SXM-40GB"
MEMORY_BYTES: Final = 40 * 2**30
MOST_GPUS: Final = 4
NAMES: Final = (
    *("resnet18", "resnet50", "inception_v3", "vit-base", "vit-large", "vit-huge"),
    *("lstm", "towers", "bert-base", "bert-large", "gpt2", "gpt2-medium"),
    *("gpt2-large", "gpt2-xl", "t5-base", "t5-large", "t5-3b", "llama-1b"),
    *("llama-3b", "llama-7b", "llama-13b"),
)
QUICK: Final = ("resnet18", "inception_v3", "lstm", "towers", "bert-base", "gpt2")
