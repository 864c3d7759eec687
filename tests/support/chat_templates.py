# ruff: noqa: E501 (templates have lines of their own)
"""Small chat templates in the public formats of well-known models, and a renderer of them without a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from kvarn.errors import UsageError


class TemplateText:
    """See kvarn.serve.toolcalls.learn.Template."""

    def __init__(self, template: str) -> None:
        self.template = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        try:
            (text,), _ = render_jinja_template(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=self.template,
                add_generation_prompt=prompt and not continue_final,
                continue_final_message=continue_final,
                bos_token="<s>",
                eos_token="</s>",
                **(variables or {}),
            )
        except Exception as error:
            raise UsageError(str(error)) from error
        return str(text)


_CHATML_TOOLS = """\
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif -%}
"""
_CHATML_END = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# Qwen 2.5 and Hermes: JSON in tags; content may be none.
HERMES = (
    _CHATML_TOOLS
    + """\
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>' + m.role }}
    {%- if m.content %}{{ '\n' + m.content }}{% endif %}
    {%- for call in m.tool_calls %}
      {%- set call = call.function %}{{ '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
      {{- call.arguments | tojson }}{{ '}\n</tool_call>' }}
    {%- endfor %}{{ '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
"""
    + _CHATML_END
)

# Qwen 3: the same with thoughts, which are dropped before the last message of the user, and a switch.
QWEN3 = (
    _CHATML_TOOLS
    + """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {%- if m.content %}{{ m.content }}{% endif %}
    {%- for call in m.tool_calls %}
      {%- if not loop.first or m.content %}{{ '\n' }}{% endif %}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {%- if call.function.arguments is string %}{{ call.function.arguments }}
      {%- else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\n</tool_call>' }}
    {%- endfor %}{{ '<|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
)

# A model that always thinks: the prompt opens the thought (QwQ, DeepSeek R1).
OPENED = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""

# Llama 3.1: bare JSON with `parameters`, one call at once, the results under the role ipython.
LLAMA3 = """\
{{- bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

Environment: ipython. Or use <|python_tag|>.
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}<|eot_id|>{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' or m.role == 'ipython' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
  {%- elif 'tool_calls' in m %}
    {%- if not m.tool_calls | length == 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
    {%- set call = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
    {{- '{"name": "' + call.name + '", ' + '"parameters": ' }}{{ call.arguments | tojson }}{{ '}' + '<|eot_id|>' }}
  {%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Mistral 7B v0.3: a list after a special token, ids of nine letters, tools before the last message of the user.
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{{ '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.role == 'system' %}{{ raise_exception('no system here') }}
  {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
  {%- elif m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}
    {%- for call in m.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}
      {%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
      {{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}
    {%- endfor %}{{ ']' + eos_token }}
  {%- else %}{{ ' ' + m.content + eos_token }}
  {%- endif %}
{%- endfor %}"""

# Mistral Small 3.2: name, id and arguments after special tokens; thoughts as in Magistral.
MISTRAL_NAMED = """\
{{- bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
  {%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
  {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
  {%- else %}
    {%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}
    {%- if m.content %}{{ m.content }}{% endif %}
    {%- for call in m.tool_calls %}
      {%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
      {%- set arguments = call.function.arguments if call.function.arguments is string else call.function.arguments | tojson %}
      {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + arguments }}
    {%- endfor %}{{ eos_token }}
  {%- endif %}
{%- endfor %}"""

# DeepSeek V3: arguments as text, in a code block, wrapped.
DEEPSEEK = """\
{{- bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
  {%- elif m.role == 'system' %}{{ m.content }}
  {%- elif m.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}
  {%- elif m.content is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
    {%- for call in m.tool_calls %}
      {%- if not loop.first %}{{ '\n' }}{% endif %}
      {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\n```json\n' }}
      {{- call['function']['arguments'] + '\n```' + '<｜tool▁call▁end｜>' }}
    {%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- else %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

# Qwen3-Coder: a tag for each argument.
QWEN_CODER = (
    _CHATML_TOOLS
    + """\
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>' + m.role }}
    {%- if m.content %}{{ '\n' + m.content + '\n' }}{% else %}{{ '\n' }}{% endif %}
    {%- for call in m.tool_calls %}
      {%- if loop.first %}{{ '<tool_call>\n<function=' }}{% else %}{{ '\n<tool_call>\n<function=' }}{% endif %}
      {{- call.function.name + '>\n' }}
      {%- for key, value in call.function.arguments | items %}
        {{- '<parameter=' + key + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}
      {%- endfor %}{{ '</function>\n</tool_call>' }}
    {%- endfor %}{{ '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
"""
    + _CHATML_END
)

# GLM 4.5: keys and values in tags of their own, and thoughts.
GLM = """\
[gMASK]<sop>{% if tools %}<|system|>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}
  {%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}
  {%- elif m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
  {%- else %}{{ '<|assistant|>' }}
    {%- if m.reasoning_content %}{{ '\n<think>' + m.reasoning_content + '</think>' }}{% else %}{{ '\n<think></think>' }}{% endif %}
    {%- if m.content %}{{ '\n' + m.content }}{% endif %}
    {%- for call in m.tool_calls %}
      {{- '\n<tool_call>' + call.function.name }}
      {%- for key, value in call.function.arguments.items() %}
{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' }}{{ value if value is string else value | tojson }}{{ '</arg_value>' }}
      {%- endfor %}
{{ '</tool_call>' }}
    {%- endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{% endif %}{% endif %}"""

# DeepSeek V3.2: a tag for each argument, which says whether it is a string.
DEEPSEEK_TAGS = (
    _CHATML_TOOLS
    + """\
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|im_start|>user\n<result>' + m.content + '</result><|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
    {%- for call in m.tool_calls %}
      {%- if loop.first %}{{ '\n\n<｜DSML｜function_calls>\n' }}{% endif %}
      {{- '<｜DSML｜invoke name="' + call.function.name + '">\n' }}
      {%- for key, value in call.function.arguments.items() %}
        {{- '<｜DSML｜parameter name="' + key + '" string="' }}{{ 'true' if value is string else 'false' }}{{ '">' }}
        {{- value if value is string else value | tojson }}{{ '</｜DSML｜parameter>\n' }}
      {%- endfor %}{{ '</｜DSML｜invoke>\n' }}
      {%- if loop.last %}{{ '</｜DSML｜function_calls>' }}{% endif %}
    {%- endfor %}{{ '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
"""
    + _CHATML_END
)

# Gemma 4: bare keys, and strings between quotes of its own.
GEMMA = """\
{%- macro write(value) -%}
  {%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
  {%- elif value is boolean %}{{ 'true' if value else 'false' }}
  {%- elif value is none %}null
  {%- elif value is mapping %}{{ '{' }}
    {%- for key, inner in value | dictsort %}{{ key + ':' }}{{ write(inner) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}
  {%- elif value is sequence %}{{ '[' }}
    {%- for inner in value %}{{ write(inner) }}{% if not loop.last %},{% endif %}{% endfor %}{{ ']' }}
  {%- else %}{{ value }}{% endif %}
{%- endmacro -%}
{{- bos_token }}{% if tools %}<|turn>system
{{ write(tools) }}<turn|>
{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|tool_response>response:' + m.name + '{value:' }}{{ write(m.content) }}{{ '}<tool_response|>' }}
  {%- else %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content or '') }}
    {%- for call in m.tool_calls %}{{ '<|tool_call>call:' + call.function.name }}{{ write(call.function.arguments) }}{{ '<tool_call|>' }}{% endfor %}
    {{- '<turn|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"""

# Llama 4: Python calls, bare.
LLAMA4 = """\
{{- bos_token }}{% if tools %}<|header_start|>system<|header_end|>

{{ tools | tojson }}<|eot|>{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|header_start|>ipython<|header_end|>\n\n' + m.content + '<|eot|>' }}
  {%- else %}{{ '<|header_start|>' + m.role + '<|header_end|>\n\n' }}
    {%- if m.content %}{{ m.content }}{% endif %}
    {%- if m.tool_calls %}[
      {%- for call in m.tool_calls %}{{ call.function.name + '(' }}
        {%- for key, value in call.function.arguments.items() %}{{ key + '=' + value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}{{ ')' }}
        {%- if not loop.last %}, {% endif %}
      {%- endfor %}]
    {%- endif %}{{ '<|eot|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"""

# gpt-oss, in outline.
HARMONY = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>
{%- if tools %}<|start|>developer<|message|>{% for tool in tools %}type {{ tool.function.name }} = ...{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
  {%- elif m.role == 'assistant' and m.tool_calls %}
    {%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
    {%- set call = m.tool_calls[0].function %}{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments | tojson + '<|call|>' }}
  {%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
  {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# LFM2: lists the tools, and leaves calls to the text of a message.
LFM = """\
{{- bos_token }}
{%- if tools %}{{ '<|im_start|>system\nList of tools: <|tool_list_start|>' + tools | tojson + '<|tool_list_end|><|im_end|>\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|im_start|>tool\n<|tool_response_start|>' + m.content + '<|tool_response_end|><|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# SmolLM2: no tools at all; content must be a string.
PLAIN = """\
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Gemma 2: no tools, and no system message to put them in.
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
)

TEMPLATES = {
    "hermes": HERMES,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral_named": MISTRAL_NAMED,
    "deepseek": DEEPSEEK,
    "qwen_coder": QWEN_CODER,
    "glm": GLM,
    "deepseek_tags": DEEPSEEK_TAGS,
    "gemma": GEMMA,
    "lfm": LFM,
    "llama4": LLAMA4,
}
"""Those that know tools."""
