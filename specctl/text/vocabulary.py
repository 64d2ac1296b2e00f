"""The vocabularies of target and draft: which token ids mean the same in both. It knows nothing about weights."""

from __future__ import annotations

from collections.abc import Collection

from specctl.errors import IncompatiblePair
from specctl.text.shown import shown
from specctl.text.tokenizer import Tokenizer


def check_vocabularies(target: Tokenizer, draft: Tokenizer, target_rows: int, draft_rows: int) -> int:
    """The number of ids, from 0 up, that target and draft share: the range a draft may propose from.

    target_rows, draft_rows: rows of the output embeddings, padding included. The shared range ends with the last id
    that is a token of both, so padding rows and tokens that one of them has beyond the other's end are left out of
    it. Inside it an id that only one of them knows is harmless (verification decides) as long as its token is not
    another id in the other. Raises IncompatiblePair naming the first id that means different things.
    """
    target_ids = {token: token_id for token, token_id in target.vocab().items() if token_id < target_rows}
    draft_ids = {token: token_id for token, token_id in draft.vocab().items() if token_id < draft_rows}
    target_token = {token_id: token for token, token_id in target_ids.items()}
    draft_token = {token_id: token for token, token_id in draft_ids.items()}
    shared = 1 + max(target_token.keys() & draft_token.keys(), default=-1)
    if not shared:
        raise IncompatiblePair(
            "target and draft have no token id in common; expected a draft with the target's tokenizer"
        )
    for token_id in range(shared):
        ours, theirs = target_token.get(token_id), draft_token.get(token_id)
        if ours == theirs:
            continue
        moved = (ours is None or ours in draft_ids) and (theirs is None or theirs in target_ids)
        if (ours is not None and theirs is not None) or moved:
            raise IncompatiblePair(
                f"token {token_id} is {_named(ours, draft_ids, 'draft')} in the target and "
                f"{_named(theirs, target_ids, 'target')} in the draft; expected a draft with the target's tokenizer"
            )
    return shared


def eos_warning(target_eos: Collection[int], draft_eos: Collection[int]) -> str | None:
    """A sentence when target and draft end their texts with different ids. Which ids end a text is the target's say."""
    if set(target_eos) == set(draft_eos):
        return None
    return f"the draft's EOS ids {sorted(draft_eos)} are not the target's {sorted(target_eos)}; the target's are used"


def _named(token: str | None, other: dict[str, int], owner: str) -> str:
    if token is None:
        return "unused"
    elsewhere = f" ({other[token]} in the {owner})" if token in other else ""
    return shown(token) + elsewhere
