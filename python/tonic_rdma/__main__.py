"""python -m tonic_rdma doctor | compare | compare-collectives"""

import argparse
import sys

from tonic_rdma import _compare, _compare_collectives, _doctor


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tonic_rdma", description="Commands of the package tonic_rdma."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {"doctor": _doctor, "compare": _compare, "compare-collectives": _compare_collectives}
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        module.add_options(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
