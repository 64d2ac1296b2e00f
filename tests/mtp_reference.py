"""What an MTP layer says, worked out from the definition: dense, from the first position on, in float64, with the
tensors by name and nothing of the code under test. For Llama, and DeepSeek-V2 and V3 without scaled rotation."""

from __future__ import annotations

import math
from pathlib import Path

import tiny
import torch
from torch import Tensor
from torch.nn import functional as F


class Reference:
    """The target and the MTP layer inside its checkpoint. mask_first: as vLLM reads the layer, the embedding of
    position 0 is zero."""

    def __init__(self, path: Path, mask_first: bool = False) -> None:
        self.config, tensors = tiny.read(path)
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.mask_first = mask_first
        self.mtp = f"model.layers.{self.config['num_hidden_layers']}"

    def hidden(self, ids: list[int]) -> Tensor:
        """[T, D]: of the target, after its last norm."""
        x = self.tensors["model.embed_tokens.weight"][ids]
        for index in range(self.config["num_hidden_layers"]):
            x = self.decoder(f"model.layers.{index}", x)
        return self.norm("model.norm", x)

    def rows(self, ids: list[int], hidden: Tensor) -> Tensor:
        """[T, D], after its last norm: the MTP layer over rows (hidden[i], ids[i]). ids: each after its position's."""
        embedding = self.tensors.get(f"{self.mtp}.embed_tokens.weight", self.tensors["model.embed_tokens.weight"])
        e = embedding[ids]
        if self.mask_first:
            e[0] = 0
        both = torch.cat((self.norm(f"{self.mtp}.enorm", e), self.norm(f"{self.mtp}.hnorm", hidden)), dim=-1)
        x = self.decoder(self.mtp, both @ self.tensors[f"{self.mtp}.eh_proj.weight"].T)
        return self.norm(f"{self.mtp}.shared_head.norm", x)

    def logits(self, out: Tensor) -> Tensor:
        own = self.tensors.get(f"{self.mtp}.shared_head.head.weight")
        return out @ (self.tensors["lm_head.weight"] if own is None else own).T

    def chain(self, ids: list[int], k: int) -> list[int]:
        """The k likeliest tokens after a text, each from what the layer gave for the one before."""
        hidden, tokens = self.hidden(ids[:-1]), list(ids)
        for _ in range(k):
            out = self.rows(tokens[1:], hidden)
            tokens.append(int(self.logits(out[-1]).argmax()))
            hidden = torch.cat((hidden, out[-1:]))
        return tokens[len(ids) :]

    # -- the parts of a layer -----------------------------------------------------------------------------------------

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (eps or self.config["rms_norm_eps"]))
        return self.tensors[f"{name}.weight"] * wide.double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def decoder(self, name: str, x: Tensor) -> Tensor:
        x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        y = self.norm(f"{name}.post_attention_layernorm", x)
        return x + self.feed(f"{name}.mlp", y)

    def feed(self, name: str, y: Tensor) -> Tensor:
        gated = F.silu(self.linear(f"{name}.gate_proj", y)) * self.linear(f"{name}.up_proj", y)
        return self.linear(f"{name}.down_proj", gated)

    def attention(self, name: str, x: Tensor) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            self.linear(f"{name}.{part}_proj", x).view(len(x), count, -1).transpose(0, 1)
            for part, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(heads // groups, dim=0) for t in (k, v))
        return self.linear(f"{name}.o_proj", seen(q, k, v).transpose(0, 1).flatten(1))

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = angles(x.shape[1], x.shape[-1], self.config["rope_parameters"]["rope_theta"])
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class DeepSeekReference(Reference):
    """Latents are expanded to keys and values, and every token goes through its experts one by one."""

    def attention(self, name: str, x: Tensor) -> Tensor:
        config = self.config
        nope, rotated, rank = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
        q = self.queries(name, x).view(len(x), -1, nope + rotated).transpose(0, 1)
        latent, key = self.linear(f"{name}.kv_a_proj_with_mqa", x).split([rank, rotated], dim=-1)
        kv = self.linear(f"{name}.kv_b_proj", self.norm(f"{name}.kv_a_layernorm", latent, 1e-6))
        k, v = kv.view(len(x), len(q), -1).transpose(0, 1).split([nope, config["v_head_dim"]], dim=-1)
        shared = self.rotate(key[None]).expand(len(q), -1, -1)
        q = torch.cat((q[..., :nope], self.rotate(q[..., nope:])), dim=-1)
        out = seen(q, torch.cat((k, shared), dim=-1), v)
        return self.linear(f"{name}.o_proj", out.transpose(0, 1).flatten(1))

    def queries(self, name: str, x: Tensor) -> Tensor:
        if self.config["q_lora_rank"] is None:
            return self.linear(f"{name}.q_proj", x)
        low = self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x), 1e-6)
        return self.linear(f"{name}.q_b_proj", low)

    def rotate(self, x: Tensor) -> Tensor:
        """Neighbours are pairs."""
        cos, sin = angles(x.shape[1], x.shape[-1], self.config["rope_theta"])
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)

    def feed(self, name: str, y: Tensor) -> Tensor:
        if f"{name}.gate.weight" not in self.tensors:
            return super().feed(name, y)
        return torch.stack([self.experts(name, row) for row in y]) + super().feed(f"{name}.shared_experts", y)

    def experts(self, name: str, y: Tensor) -> Tensor:
        chosen, weight = self.chosen(name, y)
        out = [super(DeepSeekReference, self).feed(f"{name}.experts.{int(index)}", y) for index in chosen]
        return (weight[:, None] * torch.stack(out)).sum(0)

    def chosen(self, name: str, y: Tensor) -> tuple[Tensor, Tensor]:
        config, gate = self.config, self.linear(f"{name}.gate", y)
        if config["topk_method"] == "greedy":
            best = gate.softmax(-1).topk(config["num_experts_per_tok"])
            return best.indices, best.values * config["routed_scaling_factor"]
        score = gate.sigmoid()
        groups = (score + self.tensors[f"{name}.gate.e_score_correction_bias"]).view(config["n_group"], -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(config["topk_group"]).indices
        kept = torch.full_like(groups, -math.inf)
        kept[best] = groups[best]
        chosen = kept.flatten().topk(config["num_experts_per_tok"]).indices
        return chosen, score[chosen] / (score[chosen].sum() + 1e-20) * config["routed_scaling_factor"]


def reference(path: Path, mask_first: bool = False) -> Reference:
    deep = tiny.read(path)[0]["model_type"].startswith("deepseek")
    return (DeepSeekReference if deep else Reference)(path, mask_first)


def angles(length: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    half = width // 2
    angle = torch.arange(length)[:, None] / theta ** (torch.arange(half) / half)
    return angle.float().cos().double(), angle.float().sin().double()


def seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, [heads, T, width]."""
    score = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    visible = torch.ones(score.shape[1:], dtype=torch.bool).tril()
    return score.masked_fill(~visible, -math.inf).softmax(-1) @ v
