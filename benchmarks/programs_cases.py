"""The programs of `./bench programs`: models with random weights, each with a call on one input.

A program is a function that makes it, so that a package is imported only when its program is measured.
"""

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Program = tuple[nn.Module, Callable[[], Tensor]]
"""A model, and a call of it on one input."""


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        name: what it is, with the tokens that attend to one another.
        package: the package that it needs, by the name it is imported by; None for torch alone.
        make: makes it with random weights.
        half: whether the package runs it in bfloat16.
    """

    name: str
    package: str | None
    make: Callable[[], Program]
    half: bool = True


def define_nms() -> torch.library.Library | None:
    """Let torchvision be imported beside a torch of another build, as timm does; what is returned must be kept.

    The registry's torchvision is made for CUDA: beside torch for the CPU it lacks operators that it names.
    """
    if importlib.util.find_spec("torchvision") is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class GPT(nn.Module):
    """A decoder as in nanoGPT."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([
                nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
            ])
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            parts: Any = block
            norm1, qkv, out, norm2, up, down = parts
            q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in qkv(norm1(x)).chunk(3, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(norm2(x))))
        return x


def gpt(batch: int, tokens: int, width: int = 384, layers: int = 4) -> Program:
    """As `train_shakespeare_char` of nanoGPT, with its heads of 64."""
    model, ids = GPT(width, width // 64, layers), torch.randint(1024, (batch, tokens))
    return model, lambda: model(ids)


def encoder(batch: int, tokens: int, padded: bool) -> Program:
    """torch's own encoder, with dropout 0 as torch draws dropout itself."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, activation="gelu")
    model, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(batch, tokens, 384)
    lengths = torch.linspace(tokens // 2, tokens, batch).long()
    padding = torch.arange(tokens) >= lengths[:, None] if padded else None
    return model, lambda: model(x.to(next(model.parameters()).dtype), src_key_padding_mask=padding)


def timm_vit(name: str, pixels: int, batch: int) -> Program:
    """A vision transformer of timm."""
    model = importlib.import_module("timm").create_model(name, pretrained=False, img_size=pixels)
    x = torch.randn(batch, 3, pixels, pixels)
    return model, lambda: model(x.to(next(model.parameters()).dtype))


def sentences(batch: int, words: int) -> Program:
    """An encoder of MiniLM's sizes in sentence-transformers: texts of several lengths, padded."""
    transformers: Any = importlib.import_module("transformers")
    sentence_transformers: Any = importlib.import_module("sentence_transformers")
    with tempfile.TemporaryDirectory() as folder:
        letters = [chr(code) for code in range(97, 123)]
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{each}" for each in letters)]
        (Path(folder) / "vocab.txt").write_text("\n".join(vocabulary))
        transformers.BertTokenizer(str(Path(folder) / "vocab.txt")).save_pretrained(folder)
        sizes: dict[str, Any] = {
            "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        }  # fmt: skip
        transformers.BertModel(transformers.BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
        parts = importlib.import_module("sentence_transformers.models")
        transformer = parts.Transformer(folder, max_seq_length=512)
        model = sentence_transformers.SentenceTransformer(modules=[transformer, parts.Pooling(384)], device="cpu")
    texts = [" ".join("a" for _ in range(words * (i + 1) // batch)) for i in range(batch)]
    features = model.tokenize(texts)
    return model, lambda: model(dict(features))["sentence_embedding"]


def whisper() -> Program:
    """OpenAI's Whisper of the size tiny: 30 s of audio are 1,500 tokens, and 128 tokens of text look at them."""
    module = importlib.import_module("whisper.model")
    sizes = {"n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 384, "n_audio_head": 6, "n_audio_layer": 4}
    text = {"n_vocab": 1024, "n_text_ctx": 448, "n_text_state": 384, "n_text_head": 6, "n_text_layer": 4}
    model = module.Whisper(module.ModelDimensions(**sizes, **text))
    mel, ids = torch.randn(1, 80, 3000), torch.randint(1024, (1, 128))
    for parameter in model.parameters():  # some have no initial values of their own
        nn.init.normal_(parameter, std=0.02)
    return model, lambda: model(mel.to(next(model.parameters()).dtype), ids)


def x_transformer(tokens: int, position: str = "rotary_pos_emb") -> Program:
    """A decoder of x-transformers, with rotary embeddings or with a bias that is one tensor for all layers."""
    module = importlib.import_module("x_transformers")
    layers = module.Decoder(dim=384, depth=4, heads=6, attn_flash=True, **{position: True})
    model, ids = (
        module.TransformerWrapper(num_tokens=1024, max_seq_len=tokens, attn_layers=layers),
        torch.randint(1024, (1, tokens)),
    )
    return model, lambda: model(ids)


def unet() -> Program:
    """A small UNet of diffusers, conditioned on text: 64 x 64 latents are 4,096 tokens."""
    module = importlib.import_module("diffusers")
    model = module.UNet2DConditionModel(
        sample_size=64, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64, attention_head_dim=2, norm_num_groups=16,  # heads, for all its name
    )  # fmt: skip
    x, text = torch.randn(1, 4, 64, 64), torch.randn(1, 77, 64)

    def run() -> Tensor:
        dtype = next(model.parameters()).dtype
        return model(x.to(dtype), torch.tensor(10), text.to(dtype)).sample

    return model, run


def flux() -> Program:
    """A small Flux transformer of diffusers, which goes through its attention dispatcher: 1,024 + 77 tokens."""
    module = importlib.import_module("diffusers")
    model = module.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=64, num_attention_heads=6,
        joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    x, text, pooled = torch.randn(1, 1024, 16), torch.randn(1, 77, 64), torch.randn(1, 64)
    places = torch.stack([torch.zeros(1024), torch.arange(1024) // 32, torch.arange(1024) % 32], 1)

    def run() -> Tensor:
        dtype = next(model.parameters()).dtype
        words = {"encoder_hidden_states": text.to(dtype), "pooled_projections": pooled.to(dtype)}
        time = torch.tensor([0.5], dtype=dtype)
        return model(
            hidden_states=x.to(dtype), timestep=time, img_ids=places, txt_ids=torch.zeros(77, 3), **words
        ).sample

    return model, run


def llama(tokens: int) -> Program:
    """A small Llama of transformers."""
    transformers: Any = importlib.import_module("transformers")
    sizes: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1024}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=6, num_key_value_heads=2, **sizes)
    )
    ids = torch.randint(1024, (1, tokens))
    return model, lambda: model(ids, use_cache=False).logits


CASES = (
    Case("nanoGPT, 2,048 tokens", None, lambda: gpt(1, 2048)),
    Case("nanoGPT, 12 x 256 tokens", None, lambda: gpt(12, 256)),
    Case("nanoGPT, 1 x 16 tokens, width 128", None, lambda: gpt(1, 16, 128, 2)),
    Case("nn.TransformerEncoder, 1,024 tokens", None, lambda: encoder(1, 1024, padded=False)),
    Case("nn.TransformerEncoder, 8 x 512 tokens, padded", None, lambda: encoder(8, 512, padded=True)),
    Case("nn.TransformerEncoder, 2 x 10 tokens", None, lambda: encoder(2, 10, padded=False)),
    Case("transformers: Llama, 2,048 tokens", "transformers", lambda: llama(2048)),
    Case("timm: ViT-S/16, 8 x 197 tokens", "timm", lambda: timm_vit("vit_small_patch16_224", 224, 8)),
    Case("timm: ViT-S/8, 785 tokens", "timm", lambda: timm_vit("vit_small_patch8_224", 224, 1)),
    Case("timm: ViT-S/8, 384 pixels, 2,305 tokens", "timm", lambda: timm_vit("vit_small_patch8_224", 384, 1)),
    Case("sentence-transformers: 16 texts to 256 tokens", "sentence_transformers", lambda: sentences(16, 250)),
    Case("openai-whisper: tiny, 1,500 tokens", "whisper", whisper, half=False),
    Case("x-transformers: 2,048 tokens", "x_transformers", lambda: x_transformer(2048)),
    Case("x-transformers: ALiBi, 1,024 tokens", "x_transformers", lambda: x_transformer(1024, "alibi_pos_bias")),
    Case("diffusers: UNet, 4,096 tokens", "diffusers", unet),
    Case("diffusers: Flux, 1,101 tokens", "diffusers", flux),
)
