"""script/test itself, on suites made here: whatever goes wrong in one is counted and told."""

import pytest

SUITES = """
pass() { echo "passed ${1:-1}" >>"$results"; }
skip() { echo "skipped $suite: $1" >>"$results"; }
suite_build() { pass 2; }
suite_ctest() { pass; false; pass; }
suite_readme() { pass; echo failed 3 >>"$results"; echo "FAILED: one"; seq 60; }
suite_python() { :; }
suite_engine() { skip "no engine here"; }
suite_rust() { no_such_command; }
suite_valgrind() { pass 5; }
"""


@pytest.fixture
def script_test(checkout, tools, run):
    (checkout / "script/bootstrap").write_text("#!/bin/sh\n")
    (checkout / "script/suites.sh").write_text(SUITES)

    def call(*words):
        ended = run(tools(), "script/test", *words)
        assert ended.stderr == ""
        return ended.returncode, ended.stdout.splitlines()

    return call


@pytest.mark.parametrize("suite, summary", [
    ("ctest", "3 passed, 1 failed, 0 skipped"),     # a command failed
    ("readme", "3 passed, 3 failed, 0 skipped"),    # counted failures
    ("python", "2 passed, 1 failed, 0 skipped"),    # counted nothing
    ("rust", "2 passed, 1 failed, 0 skipped"),      # could not run
])
def test_failure(script_test, suite, summary):
    status, lines = script_test(suite)
    assert status == 1 and lines[-1] == summary


def test_failures_stand_before_the_end_of_a_log(script_test):
    lines = script_test("readme")[1]
    assert lines.index("FAILED: one") < lines.index("21") and "20" not in lines


def test_success(script_test):
    status, lines = script_test("valgrind", "engine")
    assert status == 0 and lines[-1] == "7 passed, 0 failed, 1 skipped" and "skipped: engine: no engine here" in lines
    assert [line.split(":")[0] for line in lines if line.startswith(("build:", "engine:", "valgrind:", "ctest:"))] == [
        "build", "engine", "valgrind"]


def test_nothing_runs_after_a_failed_build(script_test, checkout):
    (checkout / "script/suites.sh").write_text(SUITES + "suite_build() { false; }\n")
    status, lines = script_test("valgrind")
    assert status == 1 and lines[-1] == "0 passed, 1 failed, 0 skipped"
    assert "the other suites were not run: the build failed" in lines
