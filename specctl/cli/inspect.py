"""`specctl inspect`: what a model directory holds, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from specctl.cli.options import json_option
from specctl.cli.show import count, pairs, size

if TYPE_CHECKING:
    from specctl.convert_mtp.inspection import MtpFacts
    from specctl.export.inspection import Eagle3Facts
    from specctl.inspect_model import Inspection, ModelFacts, TokenizerFacts


@click.command
@click.argument("model", metavar="PATH")
@json_option
def command(model: str, as_json: bool) -> None:
    """Tell what the model directory PATH holds: architecture, weights, MTP layers, an EAGLE-3 head and its layout,
    rope, context, tokenizer, and every problem with its remedy; of a head also what each engine would misread. A hub id
    (org/name[@revision]) is taken too.

    Exit code 0 when the model can be served, or when the head, or a DeepSeek checkpoint's MTP layer, is whole; else 2.
    """
    from specctl.hub import locate
    from specctl.inspect_model import inspect_model
    from specctl.output import to_json

    inspection = inspect_model(locate(model))
    click.echo(to_json(_as_json(inspection)) if as_json else _as_text(inspection))
    if not inspection.sound:
        raise click.exceptions.Exit(2)


def _as_json(inspection: Inspection) -> dict[str, Any]:
    facts = asdict(inspection)
    if inspection.mtp is not None:
        facts["mtp"] = {**facts["mtp"], "convertible": inspection.mtp.convertible}
        del facts["mtp"]["findings"]  # they are among the problems
    return {**facts, "path": str(inspection.path), "servable": inspection.servable}


def _as_text(inspection: Inspection) -> str:
    rows = [("path", str(inspection.path))]
    if (model := inspection.model) is not None:
        head = "tied to the embedding" if model.tied_head else "its own"
        rows += [
            ("family", model.family),
            ("layers", f"{model.layers} of width {model.hidden_size}, {model.intermediate_size} inside"),
            ("heads", _heads(model)),
            ("vocabulary", f"{model.vocab_size} rows, head {head}"),
            ("context", f"{model.context} tokens, {size(model.kv_bytes_per_token)} of KV cache each"),
            ("rope", f"{model.rope}, theta {model.rope_theta:g}"),
        ]
        if model.experts is not None:
            rows.append(("experts", f"{model.experts}, {model.experts_per_token} for a token"))
    if (weights := inspection.weights) is not None:
        rows.append(
            ("weights", f"{count(weights.parameters)} parameters, {size(weights.bytes)}, files: {weights.files}")
        )
        rows += [("", f"{part.dtype}: {part.tensors} tensors, {size(part.bytes)}") for part in weights.dtypes]
    if (mtp := inspection.mtp) is not None:
        rows += _mtp_rows(mtp)
    if (eagle3 := inspection.eagle3) is not None:
        rows += _eagle3_rows(eagle3)
    if (tokenizer := inspection.tokenizer) is not None:
        rows += _tokenizer_rows(tokenizer)
    lines = [pairs(rows)]
    if inspection.problems:
        lines.append("")
    lines += [f"{problem.severity}: {problem.what}\n  -> {problem.remedy}" for problem in inspection.problems]
    verdict = "can be served" if inspection.servable else "cannot be served"
    if inspection.mtp is not None and inspection.mtp.whole and inspection.sound:
        verdict += "; its MTP layer is whole" + (" and can be converted" if inspection.mtp.convertible else "")
    if inspection.eagle3 is not None and inspection.sound:
        verdict = "cannot be served by itself; drafts for its target"
    return "\n".join([*lines, "", verdict])


def _heads(model: ModelFacts) -> str:
    if model.latent is not None:
        return f"{model.heads}, {model.head_dim} wide, {model.latent} numbers kept for all of them"
    return f"{model.heads}, {model.kv_heads} for keys and values, {model.head_dim} wide"


def _mtp_rows(mtp: MtpFacts) -> list[tuple[str, str]]:
    found = ", ".join(map(str, mtp.found)) or "none"
    layout = f", layout {mtp.dialect}" if mtp.dialect else ""
    rows = [
        ("MTP", f"{mtp.family}, {mtp.role}{layout}; layers claimed: {mtp.claimed}, found: {found}"),
        ("", f"quantisation: {mtp.quantisation or 'none'}"),
    ]
    for layer in mtp.layers:
        dtypes = ", ".join(f"{number} {dtype}" for dtype, number in layer.dtypes.items())
        rows.append(("", f"layer {layer.number}: {layer.tensors} tensors, {size(layer.bytes)}: {dtypes}"))
        rows += [("", f"  {name}: {state}") for name, state in layer.copies.items()]
    return rows


def _eagle3_rows(head: Eagle3Facts) -> list[tuple[str, str]]:
    taps = "the original three" if head.taps is None else ", ".join(map(str, head.taps))
    norms = ", ".join(norm for norm, has in head.norms.items() if has) or "none"
    vocabulary = f"{head.draft_vocab} of {head.vocab_size} token ids"
    if head.draft_vocab == head.vocab_size:
        vocabulary = f"all {head.vocab_size} token ids"
    embedding = "its own" if head.own_embedding else "the target's"
    return [
        (
            "EAGLE-3",
            f"layout {head.layout}, width {head.width}, {head.heads} heads, {head.kv_heads} for keys and values",
        ),
        ("reads", f"taps {taps} of a target {head.target_hidden} wide; embedding {embedding}"),
        ("norms", f"{norms} (of the variants)"),
        ("says", vocabulary + ("" if head.k is None else f", {head.k} tokens at a time")),
        ("context", f"{head.context} tokens"),
        ("rope", f"{head.rope}, theta {head.rope_theta:g}"),
    ]


def _tokenizer_rows(tokenizer: TokenizerFacts) -> list[tuple[str, str]]:
    specials = [f"{role.removesuffix('_token')} {token}" for role, token in tokenizer.special.items()]
    template = "with" if tokenizer.chat_template else "no"
    return [
        ("tokenizer", f"{tokenizer.kind}, {tokenizer.ids} ids, {template} chat template"),
        ("specials", ", ".join(specials) or "none"),
        ("ends at", ", ".join(map(str, tokenizer.stop_ids)) or "nothing"),
    ]
