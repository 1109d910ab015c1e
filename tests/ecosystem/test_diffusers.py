"""Pipelines of diffusers with placed parts."""

from typing import Any

import pytest
import torch
from scripts import TOKENS, Place, equal_in_every_bit

pytestmark = pytest.mark.slow


def unet() -> Any:
    import diffusers

    torch.manual_seed(0)
    blocks: Any = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (8, 16),
    }
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        **blocks,
    ).eval()


def vae() -> Any:
    import diffusers

    torch.manual_seed(1)
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        sample_size=16,
    ).eval()


def pipeline(**parts: Any) -> Any:
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(2)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    text = CLIPTextModel(CLIPTextConfig(**sizes, num_attention_heads=2, **TOKENS)).eval()
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=20, clip_sample=False)
    made = diffusers.StableDiffusionPipeline(
        **{"unet": unet(), "vae": vae()} | parts,
        text_encoder=text,
        tokenizer=None,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.set_progress_bar_config(disable=True)
    return made


def image(pipe: Any, **options: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    words: Any = {
        f"{kind}prompt_embeds": torch.randn(1, 5, 16, generator=draw) for kind in ("", "negative_")
    }
    with torch.no_grad():
        return pipe(
            **words,
            num_inference_steps=3,
            height=16,
            width=16,
            generator=draw,
            output_type="pt",
            **options,
        ).images


def test_a_unet_in_a_pipeline_that_is_moved() -> None:
    equal_in_every_bit(lambda place: image(pipeline(unet=place(unet(), training=False)).to("cpu")))


def test_a_vae_in_a_pipeline() -> None:
    equal_in_every_bit(lambda place: image(pipeline(vae=place(vae(), training=False))))


def test_a_vae_encodes_and_decodes() -> None:
    def script(place: Place) -> Any:
        model = place(vae(), training=False)
        torch.manual_seed(0)
        with torch.no_grad():
            hidden = model.encode(torch.randn(1, 3, 16, 16)).latent_dist.mean
            return hidden, model.decode(hidden).sample

    equal_in_every_bit(script)


def test_a_pipeline_is_cast_after_placing() -> None:
    def script(place: Place) -> Any:
        return image(pipeline(unet=place(unet(), training=False)).to(torch.float64))

    assert equal_in_every_bit(script).dtype == torch.float64


def test_a_timestep_as_a_number_of_python() -> None:
    def script(place: Place) -> Any:
        model = place(unet(), training=False)
        torch.manual_seed(0)
        latent, words = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16)
        with torch.no_grad():
            for step in range(19, 0, -2):
                latent = model(latent, step, encoder_hidden_states=words).sample
        return latent

    equal_in_every_bit(script)


def test_a_unet_is_trained() -> None:
    from diffusers.training_utils import EMAModel

    def script(place: Place) -> Any:
        model = place(unet().train(), optimizer="adamw")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        average = EMAModel(model.parameters())
        torch.manual_seed(0)
        latent, words = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 16)
        for step in (3, 7):
            noise = torch.randn_like(latent)
            made = model(latent + noise, torch.tensor([step] * 2), encoder_hidden_states=words)
            torch.nn.functional.mse_loss(made.sample, noise).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())
        return dict(model.state_dict()), average.shadow_params

    equal_in_every_bit(script)
