"""Code with unit tests: honest programs earn what they pass; hacks earn nothing and harm nothing."""

import contextlib
import json
import os
import shutil
import socket
import sys
import time

import pytest

from data.selection import drop_empty
from data.sources import load_source
from pipeline.config import DataConfig, RewardConfig
from pipeline.config.data import SourceConfig
from rewards.code import CodeRunner, code_score, extract_program
from rewards.sandbox import run
from rewards.sandbox.lockdown import landlock_abi
from rewards.sandbox.run import Limits, run_script, run_test
from stages.base import gold_check
from tests.scored import problem

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not landlock_abi(), reason="this kernel cannot lock a process in"
)

LIMITS = Limits(seconds=10.0)
SHORT = Limits(seconds=1.0)


def script(source, stdin="", limits=LIMITS):
    return run_script(source, stdin, limits)


def printed(source, stdin="", limits=LIMITS):
    outcome = script(source, stdin, limits)
    assert outcome.why == ""
    return outcome.output.decode().strip()


def tried(statement):
    """What a program sees when it tries something: the name of the exception, or "done"."""
    lines = "\n".join(f"    {line}" for line in statement.splitlines())
    return printed(f"try:\n{lines}\n    print('done')\nexcept BaseException as error:\n    print(type(error).__name__)")


# -- which text is the program ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("first\n```python\na\n```\nthen\n```py\nb\n```\ndone", "b\n"),
        ("```\nx\n```", "x\n"),
        ("<think>```python\nwrong\n```</think>\n```python\nright\n```", "right\n"),
        ("<think>```python\nonly thought\n```</think> done", None),
        ("```json\n{}\n```", None),
        ("```python\nnever closed", None),
        ("```python\n\n```", None),
        ("def f(): pass", None),
        ("", None),
    ],
)
def test_the_last_closed_block_after_the_reasoning_is_the_program(text, expected):
    assert extract_program(text) == expected


def test_a_truncated_completion_has_no_program():
    assert extract_program("```python\nx = 1\n```", "length") is None


# -- honest programs ----------------------------------------------------------------------------------------------


def test_a_script_reads_and_prints():
    assert printed("a, b = map(int, input().split())\nprint(a + b)", "20 22") == "42"


def test_the_standard_library_is_there():
    assert (
        printed("import heapq, re, math, collections, decimal, fractions, datetime, random\nprint(math.comb(5, 2))")
        == "10"
    )


def test_a_script_is_main_and_may_end_itself():
    assert printed("import sys\nif __name__ == '__main__':\n    print('main')\n    sys.exit(0)") == "main"


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def add(a, b): return a + b", "assert add(1, 2) == 3"),
        ("def add(a, b): return a + b", "def check(candidate):\n    assert candidate(1, b=2) == 3\ncheck(add)"),
        ("def f(): return {'a': [1, (2, 3)], 'b': {4}}", "assert f() == {'a': [1, (2, 3)], 'b': {4}}"),
        ("def f(x): return x / 3", "import math\nassert math.isclose(f(1), 1 / 3)"),
        (
            "def f(x):\n    raise ValueError('no')",
            "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'",
        ),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(x): x.sort()", "items = [3, 1, 2]\nf(items)\nassert items == [1, 2, 3]"),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
            "s = Stack()\ns.push(5)\ns.push(6)\nassert len(s) == 2\nassert s.pop() == 6\nassert s.items == [5]",
        ),
        ("def f(): return 1j * 1j", "assert f() == -1"),
        ("def f(): return b'\\x00\\xff'", "assert f() == bytes([0, 255])"),
        ("def f(x): return x is None", "assert f(None) and not f(0)"),
        ("LIMIT = 5\ndef f(): return LIMIT", "assert f() == 5"),
        ("print('loud')\ndef f():\n    print('louder')\n    return 1", "assert f() == 1"),
    ],
)
def test_functions_are_called_from_outside(program, test):
    assert run_test(program, test, LIMITS) == ("passed", "")


def test_a_wrong_function_fails_with_a_reason():
    assert run_test("def add(a, b): return a - b", "assert add(1, 2) == 3, 'sum'", LIMITS) == (
        "failed",
        "AssertionError: sum",
    )
    assert run_test("def add(a, b): return a", "assert sub(1, 2) == 3", LIMITS)[1].startswith("KeyError")
    assert run_test("def add(a, b) return a", "assert add(1, 2) == 3", LIMITS)[1].startswith("SyntaxError")


def test_a_test_that_says_nothing_about_the_program_is_an_error():
    assert run_test("def f(x): return x", "assert f(1 == 1", LIMITS)[0] == "error"
    assert run_test("def f(g): return g(1)", "assert f(lambda x: x) == 1", LIMITS)[0] == "error"


# -- hacks: nothing is earned ------------------------------------------------------------------------------------


WRITE_TO_PIPES = "import os\nfor d in range(3, 16):\n    try: os.write(d, {})\n    except OSError: pass\n"
WRONG = "def add(a, b): return 0"
HACKS = [
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "raise SystemExit(0)",
    f"print('passed')\nprint('[\"passed\", \"\"]')\n{WRONG}",
    # Objects that equal everything, are true, and have every attribute.
    "class Any(int):\n    def __eq__(self, o): return True\n    def __bool__(self): return True\n"
    "def add(a, b): return Any(0)",
    "class Any:\n    def __eq__(self, o): return True\n    def __getattr__(self, n): return self\n"
    "def add(a, b): return Any()",
    # Patching whatever this process has of the machinery.
    f"import builtins\nbuiltins.AssertionError = Exception\nbuiltins.abs = lambda x: 0\n{WRONG}",
    f"import sys\nsys.modules['__main__'].run_test = lambda *a: ('passed', '')\n{WRONG}",
    f"import sys\nfor i in range(3):\n    sys._getframe(i).f_globals['encode'] = lambda v, r: True\n{WRONG}",
    f"import sys\nsys.settrace(lambda *a: None)\n{WRONG}",
    "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): raise SystemExit(0)",
    # Answers written into the pipes by hand, before anything was asked.
    WRITE_TO_PIPES.format("b'{\"value\": 0}\\n' * 9") + WRONG,
    WRITE_TO_PIPES.format('b\'["passed", ""]\\n\'') + "os._exit(0)",
    WRITE_TO_PIPES.format("b'[' * 10**6 + b'\\n'"),
    WRITE_TO_PIPES.format('b\'{"error": ["SystemExit", "0"]}\\n\' * 3'),
    WRITE_TO_PIPES.format('b\'{"value": 0, "changed": {"0": 3}}\\n\' * 3'),
    f"import os\nfor d in range(3, 16):\n    try: os.close(d)\n    except OSError: pass\n{WRONG}",
    # Names that the test gets from Python and not from the program.
    "abs = isinstance = len = lambda *a: True\ndef __getattr__(name): return 3",
]


@pytest.mark.parametrize("program", HACKS)
def test_no_way_round_the_test(program):
    assert run_test(program, "assert add(1, 2) == 3", LIMITS)[0] == "failed"
    assert (
        run_test(program, "value = add(1, 2)\nassert abs(value - 3) < 1e-9 and isinstance(value, int)", LIMITS)[0]
        == "failed"
    )


def test_overwriting_built_in_functions_does_not_reach_the_test():
    program = (
        "import builtins\nbuiltins.abs = builtins.sorted = lambda *a: 0\ndef f(x): return 99\ndef abs(x): return 0"
    )
    assert run_test(program, "assert abs(f(1) - 3) < 1e-9", LIMITS)[0] == "failed"


def test_the_expected_values_are_nowhere_to_be_found():
    # 7461829 stands in the test alone; the pattern that looks for it does not match itself.
    search = (
        "import gc, os, re, sys\n"
        "def look():\n"
        "    seen = [str(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))] + sys.argv\n"
        "    for path in ('test.py', '../test.py', '/proc/self/cmdline', f'/proc/{os.getppid()}/cmdline'):\n"
        "        try: seen.append(open(path).read())\n        except OSError: pass\n"
        "    return any(re.search('746[1]829', text) for text in seen)"
    )
    assert run_test(search, "assert look() is False\n7461829", LIMITS) == ("passed", "")
    # The search finds it where it is to be found.
    assert run_test(search + "\nfound = [7461829]", "assert look() is True", LIMITS) == ("passed", "")


def test_printing_the_expected_result_needs_knowing_it():
    case = problem(tests=[{"stdin": "3\n", "stdout": "9\n"}, {"stdin": "5\n", "stdout": "25\n"}])
    runner = CodeRunner(RewardConfig())
    honest, lucky = "print(int(input()) ** 2)", "print(9)"
    assert (runner.judge(case, honest).status, runner.judge(case, honest).passed) == ("correct", 2)
    assert (runner.judge(case, lucky).status, runner.judge(case, lucky).passed) == ("incorrect", 1)


def test_a_script_that_prints_and_then_fails_has_failed():
    verdict = CodeRunner(RewardConfig()).judge(
        problem(tests=[{"stdin": "", "stdout": "9"}]), "print(9)\nraise KeyError"
    )
    assert (verdict.status, verdict.rule) == ("incorrect", "test 1: it ended with status 1")


# -- hacks: nothing is harmed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("import os\nos.fork()", "PermissionError"),
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
        ("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
        ("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
        ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "PermissionError"),
        ("import socket\nsocket.socket()", "PermissionError"),
        ("import socket\nsocket.socketpair()", "PermissionError"),
        ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')", "URLError"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import os\nos.kill(-1, 9)", "PermissionError"),
        ("import os\nos.killpg(0, 9)", "PermissionError"),
        ("open('here.txt', 'w')", "PermissionError"),
        ("open('/tmp/there.txt', 'w')", "PermissionError"),
        ("import tempfile\ntempfile.mkstemp()", "FileNotFoundError"),
        ("import os\nos.mkdir('d')", "PermissionError"),
        ("import os\nos.symlink('a', 'b')", "PermissionError"),
        ("import os\nos.remove('../program.py')", "PermissionError"),
        ("import os\nos.chmod('..', 0o777)", "PermissionError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('../program.py').read()", "PermissionError"),
        ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "PermissionError"),
        ("import os\nos.listdir('/')", "PermissionError"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (9, 9))", "ValueError"),
        ("import os\nos.setuid(0)", "PermissionError"),
        ("import os\nos.nice(-5)", "PermissionError"),
        ("import numpy", "ModuleNotFoundError"),
        ("import rewards", "ModuleNotFoundError"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import os\nassert not os.listdir('.')\nassert 'HOME' not in os.environ", "done"),
    ],
)
def test_what_a_program_may_not_do_fails_inside_it(statement, error):
    assert tried(statement) == error


@pytest.mark.parametrize(
    "source",
    ["while True: pass", "import time\ntime.sleep(30)", "input()\nwhile True: pass", "import os\nos.close(1)\nwhile True: pass",
     "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"],
)  # fmt: skip
def test_an_endless_program_is_ended(source):
    started = time.monotonic()
    outcome = script(source, "x\n", SHORT)
    assert outcome.why == "no end after 1 s" or outcome.status == -9  # by the wall clock or by the processor's
    assert time.monotonic() - started < 20  # without an end it would be 30 s or forever


def test_an_endless_function_is_ended_with_its_tester():
    assert run_test("def f():\n    while True: pass", "f()", SHORT) == ("failed", "no end after 1 s")
    assert run_test("def f(): return 1", "while f(): pass", SHORT)[0] == "failed"


def test_a_flood_of_output_is_cut():
    assert script("while True: print('x' * 10**6)").why.startswith("more than 1048576 bytes")


def test_a_crash_of_the_interpreter_is_a_failed_test():
    assert script("import ctypes\nctypes.string_at(0)").status == -11
    assert run_test("import ctypes\nctypes.string_at(0)", "f()", LIMITS)[0] == "failed"


def test_machine_code_meets_the_same_walls():
    # 41 is socket, 57 fork, 62 kill on x86_64; none is a call of Python's own.
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print([(libc.syscall(*a), ctypes.get_errno()) for a in ((41, 2, 1, 0), (57,), (62, 1, 9), (321, 0, 0, 0))])"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    assert printed(source) == "[(-1, 1), (-1, 1), (-1, 1), (-1, 1)]"


def test_the_32_bit_calls_are_no_way_out():
    if os.uname().machine != "x86_64":
        pytest.skip("there are none")
    # The x32 number of socket: 41 + 2^30.
    source = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.syscall(41 + (1 << 30), 2, 1, 0))"
    assert printed(source) == "-1"


def test_the_network_is_out_of_reach_even_where_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert tried(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))") == "PermissionError"


def children():
    """Processes that this one started and that are still there, dead ones included."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                # After the name in brackets: state, parent.
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(entry)
    return found


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = children()
    for source in ("print(1)", "while True: pass", "import os\nos._exit(1)"):
        script(source, limits=SHORT)
        run_test(source, "f()", SHORT)
    assert list(tmp_path.iterdir()) == []
    assert children() == before


def test_programs_may_write_where_the_recipe_lets_them():
    limits = Limits(seconds=10.0, file_mb=1)
    assert printed("open('a', 'w').write('x' * 5)\nprint(open('a').read())", limits=limits) == "xxxxx"
    source = "try:\n    open('/tmp/there.txt', 'w')\nexcept OSError as e:\n    print(type(e).__name__)"
    assert printed(source, limits=limits) == "PermissionError"


def test_but_not_without_bound():
    limits = Limits(seconds=10.0, file_mb=1)
    assert script("open('a', 'wb').write(bytes(2 << 20))", limits=limits).status != 0
    many = "for i in range(100):\n    open(str(i), 'wb').write(bytes(1 << 20))\nwhile True: pass"
    assert script(many, limits=limits).why == "more than 1 MiB or 1000 files written"


def test_the_order_of_sets_is_the_same_in_every_run():
    source = "print({'alpha', 'beta', 'gamma', 'delta'})"
    assert len({printed(source) for _ in range(4)}) == 1


# -- the runner --------------------------------------------------------------------------------------------------


ADD = [{"code": f"assert add({a}, {b}) == {a + b}"} for a, b in ((1, 2), (0, 0), (5, -5), (2, 2))]


def test_the_fraction_of_tests_passed_or_all_or_nothing():
    # a * b equals a + b for (0, 0) and (2, 2): two of four.
    verdict = CodeRunner(RewardConfig()).judge(problem(tests=ADD), "def add(a, b): return a * b")
    assert (verdict.status, verdict.passed, verdict.total) == ("incorrect", 2, 4)
    assert (code_score(verdict, "fraction"), code_score(verdict, "all")) == (0.5, 0.0)
    assert verdict.rule == "test 1: AssertionError: "


def test_all_or_nothing_stops_at_the_first_failure():
    runner = CodeRunner(RewardConfig(code_score="all"))
    assert runner.judge(problem(tests=ADD), "def add(a, b): return a * b").passed == 0
    assert code_score(runner.judge(problem(tests=ADD), "def add(a, b): return a + b"), "all") == 1.0


def test_equal_programs_are_run_once_and_verdicts_come_in_order(monkeypatch):
    ran = []
    runner = CodeRunner(RewardConfig(workers=2))
    monkeypatch.setattr(runner, "_run", lambda program, test: (ran.append(program), ("passed", ""))[1])
    texts = ["```python\na\n```", "nothing", "```python\nb\n```", "```python\na\n```"]
    verdicts = runner.judge_many([(problem(tests=ADD[:1]), text, "stop") for text in texts])
    assert [v.status for v in verdicts] == ["correct", "no_answer", "correct", "correct"]
    assert sorted(ran) == ["a\n", "b\n"]


@pytest.mark.parametrize(
    "tests", [[], [{"input": "1"}], [{"stdin": "1"}], [{"code": 5}], ["assert True"], [{"code": "x", "stdin": ""}]]
)
def test_malformed_tests_are_no_verdict_on_the_program(tests):
    verdict = CodeRunner(RewardConfig()).judge(problem(tests=tests), "x = 1")
    assert verdict.status == "gold_unparsable"
    assert "expected stdin and stdout, or code" in verdict.rule


def test_trailing_white_space_is_no_difference_but_inner_is():
    runner = CodeRunner(RewardConfig())
    assert runner.judge(problem(tests=[{"stdin": "", "stdout": "1\n2"}]), "print('1 \\n2\\n')").status == "correct"
    assert runner.judge(problem(tests=[{"stdin": "", "stdout": "1 2"}]), "print('1  2')").status == "incorrect"


@pytest.fixture
def no_landlock(tmp_path, monkeypatch):
    """The sandbox as on a kernel without Landlock."""
    folder = tmp_path / "sandbox"
    shutil.copytree(run.HERE, folder)
    text = (folder / "lockdown.py").read_text()
    (folder / "lockdown.py").write_text(text.replace("    if not abi:\n", "    if abi:\n"))
    monkeypatch.setattr(run, "HERE", folder)


def test_a_machine_that_cannot_lock_in_says_so_and_how_to_go_on(no_landlock):
    with pytest.raises(RuntimeError, match=r"this kernel has no Landlock.*code_weak_sandbox = true") as raised:
        CodeRunner(RewardConfig()).judge_many([(problem(tests=ADD), "```python\nx\n```", "stop")])
    assert "\n" not in str(raised.value)


def test_the_weak_sandbox_is_a_choice(no_landlock):
    config = RewardConfig(code_weak_sandbox=True)
    program = "```python\ndef add(a, b): return a + b\n```"
    assert CodeRunner(config).judge_many([(problem(tests=ADD[:1]), program, "stop")])[0].status == "correct"


def test_code_problems_come_from_a_file_and_their_solutions_are_checked(tmp_path):
    file = tmp_path / "code.jsonl"
    good = "```python\ndef add(a, b):\n    if a:\n        return a + b\n    return b\n```"
    rows = [
        {"problem": "Write add(a, b).", "tests": [{"code": "assert add(1, 2) == 3"}], "solution": good},
        {"problem": "Write add2.", "tests": json.dumps([{"code": "assert add(1, 2) == 4"}]), "solution": good},
        {"problem": "Echo.", "tests": [{"stdin": "a", "stdout": "a"}]},
        {"problem": "Broken.", "tests": [{"in": "a"}]},
        {"problem": "2 + 2?", "answer": "4"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    problems = load_source(SourceConfig(name="file", path=str(file)), DataConfig(), 0)
    assert drop_empty(problems).kept == problems  # tests stand for a gold answer
    assert problems[0].solution == good
    reasons = gold_check(RewardConfig())(problems)
    assert [reason is None for reason in reasons] == [True, False, True, False, True]
    assert "its own solution against its tests is incorrect" in reasons[1]
    file.write_text('{"problem": "x", "tests": "no JSON"}')
    with pytest.raises(ValueError, match=r"tests 'no JSON': expected a list of objects"):
        load_source(SourceConfig(name="file", path=str(file)), DataConfig(), 0)
