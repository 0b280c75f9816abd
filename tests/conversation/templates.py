"""Chat templates with the structure of well-known families, written for these tests, and a tokenizer for each."""

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_LINES = [
    "The weather in Paris is sunny today, and the forecast for tomorrow says rain.",
    "user assistant system tool model function name arguments parameters description type object string",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "Call a tool only where it helps. Results come back between tags.\n\nThank you very much.\n",
    "巴黎今天天气晴朗。明天有雨。",
]

CHATML = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Write <tool_call> and JSON.<|im_end|>
{% elif messages[0].role != 'system' -%}
<|im_start|>system
You are a stub.<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- elif message.tool_calls -%}
{{ '<|im_start|>assistant' }}{% if message.content %}{{ '\\n' + message.content }}{% endif -%}
{%- for call in message.tool_calls -%}
{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson -}}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif not (loop.first and tools and message.role == 'system') -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

SMOLLM2 = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nBe a helpful stub.<|im_end|>\\n'
}}{% endif -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

QWEN3 = """\
{%- if tools or messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif -%}
{%- for tool in tools or [] %}{{ '\\n' }}{{ tool | tojson }}{% endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
{%- set text = message.content -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- set thought = message.reasoning_content or '' -%}
{%- if '</think>' in text -%}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ text }}
{%- for call in message.tool_calls or [] -%}
{{ ('\\n' if text or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

THINK_PROMPT = QWEN3.replace(
    "add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}",
    "add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}",
).replace("(loop.last or thought)", "thought")

LLAMA3 = """\
{{- bos_token }}
{%- set system = '' -%}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:]
%}{% endif -%}
{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' }}
{{- strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools -%}
{%- if not messages or messages[0].role != 'user' %}{{ raise_exception('no first user message for the tools')
}}{% endif -%}
{{ '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor -%}
{{ messages[0].content | trim + '<|eot_id|>' }}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls -%}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' -}}
{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""

MISTRAL = """\
{{- bos_token }}
{%- set system = '' -%}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n'
%}{% set messages = messages[1:] %}{% endif -%}
{%- set ns = namespace(count=0, last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
{%- if (message.role == 'user') != (ns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{%- set ns.count = ns.count + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if loop.index0 == ns.last and tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]'
}}{% endif -%}
{{ '[INST]' + (system if loop.index0 == ns.last else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls -%}
{{ '[TOOL_CALLS][' }}
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}{% endif -%}
{{ call.function | tojson }}{{ ']' if loop.last else ', ' }}
{%- endfor -%}
{{ eos_token }}
{%- elif message.role == 'assistant' -%}
{{ message.content + eos_token }}
{%- elif message.role == 'tool' -%}
{{ '[TOOL_RESULTS]' + ({'content': message.content, 'call_id': message.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}
{%- else -%}
{{ raise_exception('only user and assistant roles are supported') }}
{%- endif -%}
{%- endfor -%}
"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{{ message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

HARMONY = """\
{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- set system = '' -%}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:]
%}{% endif -%}
{%- if system or tools -%}
{{ '<|start|>developer<|message|>' + system }}
{%- for tool in tools or [] %}{{ '\\n// ' }}{{ tool | tojson }}{% endfor -%}
{{ '<|end|>' }}
{%- endif -%}
{%- set ns = namespace(call='') -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if message.thinking and (loop.last or message.tool_calls) -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif -%}
{%- if message.tool_calls -%}
{%- set ns.call = message.tool_calls[0].function.name -%}
{%- if message.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>'
}}{% endif -%}
{{ '<|start|>assistant to=functions.' + ns.call + '<|channel|>commentary json<|message|>' -}}
{{ message.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}
{%- else -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{{ '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- else -%}
{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}
"""

PHI = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif -%}
"""

DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages if message.role == 'system' %}{{ message.content }}{% endfor -%}
{%- for tool in tools or [] %}{{ '\\n' }}{{ tool | tojson }}{% endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '<|User|>' + message.content }}
{%- elif message.role == 'tool' -%}
{{ '<|out|>' + message.content + '<|/out|>' }}
{%- elif message.tool_calls -%}
{{ '<|Assistant|>' + message.content }}
{%- for call in message.tool_calls
%}{{ '<|call|>' + call.function.name + '\\n' + call.function.arguments + '<|/call|>' }}{% endfor -%}
{{ eos_token }}
{%- elif message.role == 'assistant' -%}
{{ ('' if loop.previtem.role == 'tool' else '<|Assistant|>') + message.content.split('</think>')[-1] + eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|Assistant|>' }}{% endif -%}
"""

PLAIN = """\
{%- for message in messages -%}
{{ message.role | capitalize + ': ' + message.content + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif -%}
"""


@dataclass(frozen=True)
class Family:
    """One template and what is known of it."""

    name: str
    template: str
    special: tuple[str, ...]
    eos: str
    added: tuple[str, ...] = ()
    bos: str | None = None
    has_native_tools: bool = True
    has_parallel_calls: bool = True
    rewrites_history: bool = False
    has_middle_system: bool = True

    def tokenizer(self) -> Any:
        return make_tokenizer(self.template, self.special, eos=self.eos, bos=self.bos, added=self.added)


_IM = ("<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", CHATML, _IM, "<|im_end|>", _TAGS),
        Family("smollm2", SMOLLM2, _IM, "<|im_end|>", has_native_tools=False),
        Family("qwen3", QWEN3, _IM, "<|im_end|>", _TAGS, rewrites_history=True),
        Family("think prompt", THINK_PROMPT, _IM, "<|im_end|>", _TAGS, rewrites_history=True),
        Family(
            "llama3",
            LLAMA3,
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|eot_id|>",
            bos="<|begin_of_text|>",
            has_parallel_calls=False,
        ),
        Family(
            "mistral",
            MISTRAL,
            (
                *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
                *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            ),
            "</s>",
            bos="<s>",
            rewrites_history=True,
            has_middle_system=False,
        ),
        Family(
            "gemma",
            GEMMA,
            ("<bos>", "<start_of_turn>", "<end_of_turn>"),
            "<end_of_turn>",
            bos="<bos>",
            has_native_tools=False,
            has_middle_system=False,
        ),
        Family(
            "harmony",
            HARMONY,
            ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
            "<|return|>",
            has_parallel_calls=False,
            rewrites_history=True,
        ),
        Family(
            "deepseek",
            DEEPSEEK,
            ("<s>", "</s>", "<|User|>", "<|Assistant|>", "<|call|>", "<|/call|>", "<|out|>", "<|/out|>"),
            "</s>",
            bos="<s>",
            has_middle_system=False,
        ),
        Family("plain", PLAIN, ("<eos>",), "<eos>", has_native_tools=False),
        Family(
            "phi",
            PHI,
            ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
            "<|endoftext|>",
            has_native_tools=False,
        ),
    )
}


def make_prefixing_tokenizer(family: Family) -> Any:
    """Build a tokenizer of the SentencePiece kind, which sets a space before what it takes for the start of a text."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    letters = sorted(set("".join(_LINES) + "▁:!?.\n"))
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=letters, special_tokens=["<unk>"], show_progress=False
    )
    core.train_from_iterator(_LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=family.eos, bos_token=family.bos)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.chat_template = family.template
    return tokenizer


def make_tokenizer(
    template: str | None,
    special: tuple[str, ...],
    *,
    eos: str,
    bos: str | None = None,
    added: tuple[str, ...] = (),
) -> Any:
    """Build a real byte-level BPE tokenizer from a few lines."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(_LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, bos_token=bos)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = template
    return tokenizer
