"""Runs the tests of one module, and appends a line of JSON to a file when a test starts and when it ends.

one_module.py MODULE RESULTS LIMIT_S [DONE...]: without the tests DONE. A test that takes longer than LIMIT_S
ends the process, with the stacks of all threads on stderr.
"""

import faulthandler
import importlib
import json
import sys
import traceback
import unittest


def leaves(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from leaves(item)
        else:
            yield item


class Results(unittest.TestResult):
    def __init__(self, file, limit_s):
        super().__init__()
        self.file, self.limit_s, self.subtest_failed = file, limit_s, False

    def write(self, test, outcome, reason=""):
        print(json.dumps([test.id(), outcome, reason]), file=self.file, flush=True)

    def startTest(self, test):
        super().startTest(test)
        self.subtest_failed = False
        self.write(test, "started")
        faulthandler.dump_traceback_later(self.limit_s, exit=True)

    def stopTest(self, test):
        faulthandler.cancel_dump_traceback_later()
        super().stopTest(test)

    def failed(self, test, error):
        traceback.print_exception(*error)
        self.write(test, "failed", " ".join("".join(traceback.format_exception_only(*error[:2])).split())[:300])

    addError = addFailure = failed

    def addSubTest(self, test, subtest, error):
        if error is not None and not self.subtest_failed:
            self.subtest_failed = True
            self.failed(test, error)

    def addSuccess(self, test):
        self.write(test, "ok")

    def addSkip(self, test, reason):
        self.write(test, "skipped", reason)

    def addExpectedFailure(self, test, error):
        self.write(test, "ok")

    def addUnexpectedSuccess(self, test):
        self.write(test, "failed", "was expected to fail")


def main():
    module, results, limit_s, *done = sys.argv[1:]
    tests = leaves(unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module)))
    suite = unittest.TestSuite(it for it in tests if it.id() not in done)
    with open(results, "a") as file:
        suite.run(Results(file, float(limit_s)))


if __name__ == "__main__":
    main()
