"""A user's reward function in a process of its own: what it may do without harming the run."""

import os
import time

import pytest

from rewards.user_functions import PATIENCE, UserFunction
from tests.scored import problem


def outcomes(name, texts=("one", "two", "three"), timeout=30.0):
    function = UserFunction(name, f"tests.user_rewards:{name}", timeout)
    try:
        return function.call_many([(problem(), text) for text in texts])
    finally:
        function.close()


def test_values_come_back_in_order():
    assert outcomes("words", ("a", "a b", "a b c")) == [("value", 1), ("value", 2), ("value", 3)]


def test_printing_does_not_break_the_answers():
    assert outcomes("noisy") == [("value", 1.0)] * 3


def test_a_numpy_number_is_a_number():
    assert outcomes("numpy_scalar", ("a",)) == [("value", 0.5)]


def test_an_exception_is_told_and_the_next_call_works():
    assert outcomes("raises_on_two") == [("value", 1.0), ("raised", "KeyError: 'two'"), ("value", 1.0)]


def test_a_call_that_hangs_is_ended_and_the_next_one_works():
    started = time.monotonic()
    kinds = [kind for kind, _ in outcomes("hangs_on_two", timeout=0.5)]
    assert kinds == ["value", "hung", "value"]
    assert time.monotonic() - started < 60  # the function sleeps for 60 s


def test_a_function_that_always_hangs_is_given_up():
    kinds = [kind for kind, _ in outcomes("hangs", ["x"] * 10, timeout=0.2)]
    assert kinds == ["hung"] * PATIENCE + ["given_up"] * (10 - PATIENCE)


def test_a_call_that_ends_its_process_is_told():
    assert outcomes("exits", ("a",)) == [("died", "its process ended with status 3")]


def test_what_is_no_number_comes_back_by_name():
    assert outcomes("a_list", ("a",)) == [("value", "<list>")]
    assert outcomes("unpicklable", ("a",)) == [("value", "<function>")]
    assert outcomes("a_string", ("a",)) == [("value", "1.0")]


@pytest.mark.parametrize(
    ("target", "detail"),
    [
        ("tests.user_rewards:missing", "has no attribute 'missing'"),
        ("no.such.module:function", "No module named 'no'"),
        ("tests.user_rewards:SEVEN", "is not callable"),
    ],
)
def test_a_function_that_cannot_be_imported_is_one_clear_line(target, detail):
    with pytest.raises(ValueError, match=rf"rewards\.functions\.mine is '{target}': .*{detail}"):
        UserFunction("mine", target, 5.0)


def test_closing_leaves_no_process_behind():
    function = UserFunction("words", "tests.user_rewards:words", 5.0)
    pid = function._process.pid
    function.close()
    function.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_answers_again_after_closing():
    function = UserFunction("words", "tests.user_rewards:words", 30.0)
    function.close()
    assert function.call_many([(problem(), "a b")]) == [("value", 2)]
    function.close()
