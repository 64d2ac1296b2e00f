"""Chat templates of the shapes that are in use, in words of our own, and byte tokenizers with the tokens they write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True)
class Shape:
    """A template; the special tokens it writes beside the tiny tokenizer's own; what ends a turn."""

    template: str
    tokens: tuple[str, ...]
    end: str


# A header token on either side of the role, a blank line behind it, contents trimmed.
HEADERS = Shape(
    "{{ bos_token }}{% for m in messages %}<|begin|>{{ m.role }}<|done|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant<|done|>\n\n{% endif %}",
    ("<|begin|>", "<|done|>", "<|eot|>"),
    "<|eot|>",
)

# A line feed behind every end of turn, which nobody generates; a system turn of its own where none is given.
LINES = Shape(
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

# No header before an answer and so no generation prompt; the roles have to alternate; an end behind answers only.
INSTRUCTIONS = Shape(
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles have to alternate, user first') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    ("[INST]", "[/INST]"),
    "</s>",
)

# Another name for the assistant; no system turns; contents trimmed; a line feed behind every turn.
MODEL_TURNS = Shape(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('there is no system role') }}"
    "{% endif %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}",
    ("<turn>", "<end>"),
    "<end>",
)

# Thinking is shown in the last answer only; an answer without any gets an empty one there.
THINKING = Shape(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.reasoning_content if m.reasoning_content is string else "
    "(m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '') %}"
    "{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "<|im_end|>",
)

# The generation prompt opens the thinking itself, and the answers that are shown have none.
OPENED_THINKING = Shape(
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|A|>{{ m.content.split('</think>')[-1] }}<|eos|>"
    "{% else %}<|U|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|A|><think>\n{% endif %}",
    ("<|A|>", "<|U|>", "<|eos|>", "<think>", "</think>"),
    "<|eos|>",
)

# The end of the text behind the last turn, when nobody is to go on.
CLOSED = Shape(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|over|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ("<|user|>", "<|assistant|>", "<|system|>", "<|over|>"),
    "<|over|>",
)

# No special token anywhere.
BARE = Shape(
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}",
    (),
    "\n\n",
)

# The system's words stand in the last user turn, wherever that is.
MOVING_SYSTEM = Shape(
    "{{ bos_token }}{% set first = messages[0] %}{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if loop.last and first.role == 'system' %}{{ first.content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}",
    ("[INST]", "[/INST]"),
    "</s>",
)


def tokenizer(path: Path, shape: Shape, *, merges: bool = False) -> Path:
    """A byte tokenizer with the shape's tokens and its template. merges: two line feeds, or a space and an o, are one
    token, so that tokens reach over borders; the ids of the added tokens are two higher then."""
    tiny.byte_tokenizer(path, chat_template=shape.template)
    file = path / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    if merges:
        symbols = {symbol: id for symbol, id in backend.get_vocab(with_added_tokens=False).items() if id < 256}
        model = models.BPE(vocab=symbols | {"ĊĊ": 256, "Ġo": 257}, merges=[("Ċ", "Ċ"), ("Ġ", "o")])
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    tokens = [*tiny.SPECIAL, *shape.tokens]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    backend.save(str(file))
    return path
