from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.tiny_tokenizers import CHATML
from xpress_runtime import chat_template
from xpress_runtime.chat_template import ChatTemplate
from xpress_runtime.errors import BundleError, PromptError

USER = [{"role": "user", "content": "Hi <b> & 'é' 好"}]
TEMPLATES = {
    "chatml": CHATML,
    "blocks": "{% for m in messages %}\n    {% if loop.first %}\n  1\n    {% endif %}\n{{ m.role }}: {{ m.content|trim }}\n{% endfor %}\n",
    "tojson": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ tools | tojson }}|{{ 'é' | tojson(ensure_ascii=true) }}",
    "loop controls": "{% for i in range(9) %}{% if i==2 %}{% continue %}{% endif %}{% if i==5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "generation": "a{% generation %}{% set x = 1 %}{{ messages[0].role }} {% endgeneration %}b\n{%- generation -%} c {%- endgeneration -%}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ dict(a=1) }}",
    "time": "{{ strftime_now('%Y') }}{{ strftime_now(format='%Y') }}",
    "specials": "{{ bos_token }}{{ eos_token }}{{ missing }}{{ missing is defined }}{{ tools is none }}{{ documents is none }}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ extra }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}{% endfor %}",
    "slices": "{{ messages[-1].content[:3] }}{{ messages[0]['content'].split(' ')[0] }}{{ messages[0].content is string }}",
    "macro": "{% macro f(m) %}{{ m.role }}{% endmacro %}{{ f(messages[0]) }}{{ messages|length }}{{ messages|map(attribute='role')|join }}",
}
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "one": USER,
    "several": [{"role": "system", "content": " s "}, *USER, {"role": "assistant", "content": "ok", "thinking": "hm"}, *USER],
    "nulls": [{"role": "user", "content": "x", "name": None, "tool_calls": None}],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, False, variables)


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_same_as_transformers(name: str, messages: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

    variables = {"enable_thinking": False, "extra": {"a": [1, 2.5, None, True]}}
    chat = MESSAGES[messages]
    expected, _ = render_jinja_template(
        [_normalize_chat_messages(chat)],
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
        **variables,
    )
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(chat, add_generation_prompt, variables) == expected[0]


def test_tools_and_special_tokens_can_be_given() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert render("{{ tools[0].function.name }}{{ bos_token }}", tools=tools, bos_token="!") == "f!"


def test_template_cannot_change_messages() -> None:
    messages = [dict(USER[0])]
    with pytest.raises(PromptError, match="SecurityError"):
        render("{{ messages.append(1) }}", messages)
    assert messages == USER


def test_refusal_of_the_template_is_shown_in_one_line() -> None:
    with pytest.raises(PromptError) as caught:
        render("{{ raise_exception('Roles must\nalternate') }}")
    assert str(caught.value) == "the chat template refuses these messages: Roles must alternate"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ ''|attr('__class__')|attr('__base__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('x') }}",
        "{{ ['x']|map(attribute='__class__')|list }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace(**{'_x': 1}) }}",
        "{{ lipsum() }}",
        "{{ range(10000000) | list }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{{ missing.deeper }}",
        "{% include 'other' %}",
        "{% import '/etc/passwd' as x %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_escape_or_defect_is_one_line_or_nothing(source: str) -> None:
    try:
        text = render(source)
    except PromptError as problem:
        assert "\n" not in str(problem)
    else:
        # Jinja answers some with an undefined value, which prints as nothing.
        assert text.replace("[Undefined]", "") == ""


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARACTERS", 1000)
    with pytest.raises(PromptError, match="more than 1000 characters"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' }}{% endfor %}{% endfor %}")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'open }}", "{% endfor %}", "{% unknown %}", "{{ x | nofilter }}", "(" * 10 + "{{" + "(" * 20000]
)
def test_invalid_template(source: str) -> None:
    with pytest.raises(BundleError) as caught:
        ChatTemplate(source, {}, "chat.jinja")
    assert str(caught.value).startswith("chat.jinja ")
    assert "\n" not in str(caught.value)


def test_huge_template() -> None:
    with pytest.raises(BundleError, match="at most"):
        ChatTemplate("x" * (chat_template.MAX_TEMPLATE_CHARACTERS + 1), {})


DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ("Hi", "of type str, expected a list"),
        ({"role": "user", "content": "x"}, "of type dict, expected a list"),
        (None, "of type NoneType"),
        ([], "empty"),
        (["Hi"], "message 0 is of type str"),
        ([*USER, {"content": "x"}], "message 1 has no role"),
        ([{"role": 5, "content": "x"}], "message 0 has a role of type int"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "user", "content": 7}], "message 0 has a content of type int"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "message 0, part 0 of its content is of type 'image'"),
        ([{"role": "user", "content": ["x"]}], "part 0 of its content is of str"),
        ([{"role": "user", "content": "x", "file": object()}], "message 0 holds a value of type object"),
        ([{"role": "user", "content": "x", 5: "y"}], "message 0 holds a key of type int"),
        ([{"role": "user", "content": "x", "deep": DEEP}], "nested deeper"),
    ],
)
def test_malformed_messages(messages: Any, part: str) -> None:
    with pytest.raises(PromptError) as caught:
        render(CHATML, messages)
    assert part in str(caught.value)


def test_message_that_calls_tools_needs_no_content() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", [message]) == '{"x": 1}'


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"continue_final_message": True}, "'continue_final_message'"),
        ({"messages": []}, "'messages'"),
        ({"thing": open}, "template variable 'thing' holds a value of type builtin_function_or_method"),
    ],
)
def test_refused_variables(variables: dict[str, Any], part: str) -> None:
    with pytest.raises(PromptError, match=part):
        ChatTemplate(CHATML, {}).render(USER, True, variables)
