"""Functions such as a user may bring, most of them broken."""

import os
import time

import numpy as np


def words(problem, text):
    return len(text.split())


def noisy(problem, text):
    print("this must not disturb anything", flush=True)
    return 1.0


def numpy_scalar(problem, text):
    return np.float32(0.5)


def raises(problem, text):
    raise ZeroDivisionError("on purpose")


def raises_on_two(problem, text):
    if text == "two":
        raise KeyError("two")
    return 1.0


def hangs(problem, text):
    time.sleep(60)


def hangs_on_two(problem, text):
    return time.sleep(60) if text == "two" else 1.0


def exits(problem, text):
    os._exit(3)


def not_a_number(problem, text):
    return float("nan")


def infinite(problem, text):
    return float("inf")


def a_string(problem, text):
    return "1.0"


def a_list(problem, text):
    return [1.0, 2.0]


def nothing(problem, text):
    return None


def unpicklable(problem, text):
    return lambda: None


SEVEN = 7
