"""The loop: messages, commands, and what goes wrong and changes nothing."""

import os
import signal
from collections.abc import Callable

import pytest
from fake_chat import answer_to, fake_talk

from kvarn.errors import KvarnError
from kvarn.serve.chat.commands import COMMANDS, Chat
from kvarn.serve.chat.local import LocalTalk

Chatting = Callable[..., Chat]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_conversation_reads_all_that_was_said(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, "hi", "again", "//slash")
    chat.run()
    said = ""
    for turn, answer in zip(["<user>hi", "\n<user>again", "\n<user>/slash"], chat.screen.answers, strict=False):
        said += turn + "\n<assistant>"
        assert answer == answer_to(said, 10)
        said += answer
    assert chat.screen.errors == []


def test_the_system_prompt_is_first_and_clear_keeps_it(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, "old", "/system Be brief.", "hi", "/clear", "hi")
    chat.run()
    wanted = answer_to("<system>Be brief.\n<user>hi\n<assistant>", 10)
    assert chat.screen.answers[1:3] == [wanted, wanted]


def test_retry_takes_another_seed_and_says_what_temperature_0_means(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, "hi", "/retry", "/set temperature 1", "/set seed 7", "/retry", "/retry", "more", "/retry")
    seeds: list[int] = []
    answer = talk._answer
    talk._answer = lambda prompt, turns, settings, listener: (  # type: ignore[method-assign]
        seeds.append(settings.sampling.seed),  # type: ignore[func-returns-value]
        answer(prompt, turns, settings, listener),
    )[1]
    chat.run()
    assert seeds == [0, 0, 8, 9, 7, 8]
    assert any("temperature is 0, so the same words come again" in note for note in chat.screen.notes)
    assert len(talk.session.turns) == 4, "an answer is replaced, not added"
    assert chat.settings.sampling.seed == 7


def test_undo_drops_turns_one_by_one(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, "one", "two", "/undo", "/undo", "/undo", "/retry")
    chat.run()
    assert talk.session.tokens == talk.session.turns == ()
    assert [note for note in chat.screen.notes if note.startswith("dropped")] == ["dropped: two", "dropped: one"]
    assert chat.screen.errors == ["nothing was said yet"] * 2


def test_ctrl_c_stops_an_answer_and_what_was_said_stays(chatting: Chatting) -> None:
    talk = fake_talk(seconds=0.002)
    chat = chatting(talk, "hi", "go on", max_tokens=500)

    def stop_after_5(piece: str) -> None:
        if len(chat.screen.answers) == 1 and len(chat.screen.answers[0]) == 5:
            interrupt()
        if len(chat.screen.answers) == 2:
            interrupt()

    chat.screen.on_text = stop_after_5
    chat.run()
    talk.close()
    first, second = chat.screen.answers[:2]
    assert 5 <= len(first) < 100
    assert first == answer_to("<user>hi\n<assistant>", len(first))
    assert second == answer_to(f"<user>hi\n<assistant>{first}\n<user>go on\n<assistant>", len(second))
    assert chat.screen.notes.count("stopped; what was said so far stays") == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_word_changes_nothing(chatting: Chatting) -> None:
    talk = fake_talk(context=4096, seconds=0.05)
    chat = chatting(talk, "x" * 2000)
    chat.screen.reading = lambda done, total: interrupt()
    chat.run()
    talk.close()
    assert talk.session.tokens == ()
    assert "stopped before a word" in chat.screen.notes[-1]


def test_ctrl_c_at_the_prompt_hints_at_ctrl_d(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, KeyboardInterrupt, "/bye", "not read")
    chat.run()
    assert chat.screen.notes == ["Ctrl-D or /bye leaves"]
    assert chat.reader.lines == ["not read"]


def test_a_full_context_is_said_with_both_numbers_and_changes_nothing(chatting: Chatting) -> None:
    talk = fake_talk(context=128)
    chat = chatting(talk, "hi", "x" * 200, "/undo", "hi")
    chat.run()
    talk.close()
    (error,) = chat.screen.errors
    assert "has 249 tokens" in error
    assert "a context of 128" in error
    assert "/undo" in error
    assert "/clear" in error
    assert chat.screen.answers[0] == chat.screen.answers[2] == answer_to("<user>hi\n<assistant>", 10)
    assert chat.screen.answers[1] == ""


def test_an_answer_that_ends_for_its_length_says_why(chatting: Chatting) -> None:
    talk = fake_talk(context=128)
    chat = chatting(talk, "hi", "/clear", "/set max_tokens 500", "hi")
    chat.run()
    talk.close()
    ends = [note for note in chat.screen.notes if note.startswith("the answer ends here")]
    assert "max_tokens is 10" in ends[0]
    assert "the context of 128 tokens is full; /undo" in ends[1]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/nothing", "no command /nothing; /help"),
        ("/ help", "no command /;"),
        ("/usr/bin/env", "// begins a message"),
        ("/set", "/set needs more: /set NAME VALUE"),
        ("/set heat 1", "no setting 'heat'"),
        ("/set top_p 7", "top_p 7.0 is not"),
        ("/undo 2", "/undo takes nothing"),
        ("/load none", "no session 'none'"),
        ("/save ../x", "no session name"),
        ("/stats", "nothing was answered yet"),
        ("refuse me", "the template refuses"),
        ("half \ud800", "not UTF-8"),
    ],
)
def test_what_is_wrong_is_one_line_and_changes_nothing(
    talk: LocalTalk, chatting: Chatting, line: str, text: str
) -> None:
    chat = chatting(talk, line)
    before = (chat.settings, talk.session)
    chat.run()
    (error,) = chat.screen.errors
    assert text in error
    assert (chat.settings, talk.session) == before


def test_help_show_stats_and_cache_say_what_there_is(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, "word " * 40, "more", "/help", "/show", "/stats", "/cache")
    chat.run()
    said = "\n".join(chat.screen.notes)
    assert all(f"/{name}" in said for name in COMMANDS)
    assert "cache: kvarn_k4v2_g64" in said
    assert f"tokens: {len(talk.session.tokens)} of 1024, 2 turns" in said
    assert "max_tokens 10" in said
    assert "192 of them cached" in said
    assert "answer: 10 tokens" in said
    assert f"the same {len(talk.session.tokens) - 1} tokens exact" in said
    assert "192 tokens were not computed again (192 from memory, 0 from disk)" in said
    assert "disk: off" in said


def test_a_session_is_saved_at_every_change_and_goes_on_in_another_chat(talk: LocalTalk, chatting: Chatting) -> None:
    chatting(talk, "/system Be brief.", "one", "two", "three", "/undo", session="s").run()
    other = fake_talk()
    chat = chatting(other, "/load s", "/retry", "/undo", "/undo", "/clear", "hi")
    chat.run()
    other.close()
    assert "> two" in chat.screen.notes
    shown, again, after = chat.screen.answers[:3]
    assert shown == again == answer_to(answer_text(talk), 10)
    assert "dropped: one" in chat.screen.notes
    assert after == answer_to("<system>Be brief.\n<user>hi\n<assistant>", 10)
    assert chat.screen.errors == []


def answer_text(talk: LocalTalk) -> str:
    """All that the model had read before its last answer."""
    session = talk.session
    return talk._spelled(session.tokens[: session.turns[-1]])


def test_save_and_load_are_a_copy(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, "one", "/save a", "two", "/load a")
    chat.run()
    assert len(talk.session.turns) == 2
    assert chat.screen.notes[-2:] == ["tokens: 31 of 1024, 1 turns", "> one"]


def test_lines_that_could_not_be_done_are_counted(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, "hi", "", "/nothing")
    with pytest.raises(KvarnError, match="1 of 2 lines"):
        chat.run_lines()


def test_an_interrupt_ends_a_pipe(talk: LocalTalk, chatting: Chatting) -> None:
    chat = chatting(talk, "hi", "not read", max_tokens=500)
    chat.screen.on_text = lambda piece: interrupt()
    with pytest.raises(KeyboardInterrupt):
        chat.run_lines()
    assert chat.reader.lines == ["not read"]
