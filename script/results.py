"""Counts of a test runner's own report, as lines that script/test adds up: "passed N", "failed N", "skipped why".

    results.py ctest FILE.xml     ctest --output-junit; a doctest program counts as its test cases
    results.py pytest FILE.xml    pytest --junitxml
    results.py summary FILE.txt   output whose last such line is "N passed, N failed, N skipped"
A test that prints a line "SKIP: why" is skipped for that reason.
"""
import argparse
import re
import xml.etree.ElementTree as ET


def ctest(path):
    passed, failed, skipped = 0, 0, []
    for case in ET.parse(path).iter("testcase"):
        name, output = case.get("name"), case.findtext("system-out") or ""
        reasons = [f"{name}: {why.strip()}" for why in re.findall(r"^SKIP: (.*)$", output, re.M)]
        counts = re.search(
            r"\[doctest\] test cases:\s*\d+ \|\s*(\d+) passed \|\s*(\d+) failed \|\s*(\d+) skipped", output)
        if case.get("status") == "fail" or case.find("failure") is not None:
            passed += int(counts[1]) if counts else 0
            failed += max(1, int(counts[2])) if counts else 1
        elif case.get("status") != "run":
            why = case.find("skipped").get("message") if case.find("skipped") is not None else "not run"
            if why.startswith("SKIP_"):  # it skipped itself; anything else could not run
                skipped += reasons or [f"{name}: gave no reason"]
            else:
                failed += 1
        elif counts:
            passed += int(counts[1]) - len(reasons)
            skipped += reasons + [f"{name}: a case marked as skipped"] * int(counts[3])
        else:
            passed += not reasons
            skipped += reasons
    return passed, failed, skipped


def pytest(path):
    passed, failed, skipped = 0, 0, []
    for case in ET.parse(path).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None:
            skipped.append(f"{case.get('classname')}.{case.get('name')}: {skip.get('message')}")
        else:
            passed += 1
    return passed, failed, skipped


def summary(path):
    text = open(path, encoding="utf-8", errors="replace").read()
    passed, failed, _ = re.findall(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", text, re.M)[-1]
    return int(passed), int(failed), [why.strip() for why in re.findall(r"^SKIP: (.*)$", text, re.M)]


def main():
    kinds = {"ctest": ctest, "pytest": pytest, "summary": summary}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("report")
    arguments = parser.parse_args()
    passed, failed, skipped = kinds[arguments.kind](arguments.report)
    print(f"passed {passed}\nfailed {failed}")
    for why in skipped:
        print("skipped", " ".join(why.split()))


if __name__ == "__main__":
    main()
