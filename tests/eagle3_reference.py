"""What an EAGLE-3 head says, worked out from the definition: dense, from the first position on, in float64, with the
tensors by name and nothing of the code under test. For the Llama family without scaled rotation."""

from __future__ import annotations

from pathlib import Path

import tiny
import torch
from mtp_reference import Reference as Target
from mtp_reference import angles, seen
from torch import Tensor
from torch.nn import functional as F


class Reference:
    """The target, and the head in a directory of any layout."""

    def __init__(self, target: Path, head: Path) -> None:
        self.target = Target(target)
        config, tensors = tiny.read(head)
        self.flags = config
        self.config = config.get("transformer_layer_config", config)
        self.tensors = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
        prefix = "layers.0." if "transformer_layer_config" in config else "midlayer."
        self.head = {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}
        layers = self.target.config["num_hidden_layers"]
        self.taps = config.get("eagle_aux_hidden_state_layer_ids", [2, layers // 2, layers - 3])
        self.ids = None
        if "d2t" in tensors:
            self.ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def read(self, ids: list[int]) -> Tensor:
        """[T, D]: of the residuals that enter the tapped layers; with L layers, tap L is what leaves the last."""
        x, taps = self.target.tensors["model.embed_tokens.weight"][ids], dict[int, Tensor]()
        for index in range(self.target.config["num_hidden_layers"]):
            taps[index] = x
            x = self.target.decoder(f"model.layers.{index}", x)
        taps[self.target.config["num_hidden_layers"]] = x  # what leaves the last layer
        parts = [taps[tap] for tap in self.taps]
        joined = torch.cat(parts, dim=-1)
        if self.flags.get("norm_before_fc"):
            joined = self.norm(self.tensors["input_norm.weight"], joined)
        if self.flags.get("fc_norm"):
            width = parts[0].shape[1]
            joined = torch.cat(
                [
                    self.norm(self.tensors[f"fc_norm.{i}.weight"], joined[:, i * width : (i + 1) * width])
                    for i in range(len(parts))
                ],
                dim=-1,
            )
        return joined @ self.tensors["fc.weight"].T

    def rows(self, ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The head over rows (hidden[i], ids[i]): what its lm_head gets, and what the next row is fed."""
        embedding = self.tensors.get("embed_tokens.weight", self.target.tensors["model.embed_tokens.weight"])
        e = self.norm(self.head["input_layernorm.weight"], embedding[ids])
        h = self.norm(self.head["hidden_norm.weight"], hidden)
        x = h if self.flags.get("norm_before_residual") else hidden
        x = x + self.attention(torch.cat((e, h), dim=-1))
        y = self.norm(self.head["post_attention_layernorm.weight"], x)
        gated = F.silu(y @ self.head["mlp.gate_proj.weight"].T) * (y @ self.head["mlp.up_proj.weight"].T)
        x = x + gated @ self.head["mlp.down_proj.weight"].T
        out = self.norm(self.tensors["norm.weight"], x)
        return out, out if self.flags.get("norm_output") else x

    def chain(self, ids: list[int], k: int) -> list[int]:
        """The k likeliest tokens after a text, each from what the head gave for the one before."""
        hidden, tokens = self.read(ids[:-1]), list(ids)
        for _ in range(k):
            out, fed = self.rows(tokens[1:], hidden)
            row = int((out[-1] @ self.tensors["lm_head.weight"].T).argmax())
            tokens.append(row if self.ids is None else int(self.ids[row]))
            hidden = torch.cat((hidden, fed[-1:]))
        return tokens[len(ids) :]

    def norm(self, weight: Tensor, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return weight * wide.double()

    def attention(self, x: Tensor) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            (x @ self.head[f"self_attn.{part}_proj.weight"].T).view(len(x), count, -1).transpose(0, 1)
            for part, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(heads // groups, dim=0) for t in (k, v))
        return seen(q, k, v).transpose(0, 1).flatten(1) @ self.head["self_attn.o_proj.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = angles(x.shape[1], x.shape[-1], self.config["rope_parameters"]["rope_theta"])
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
