"""The tests on every Python, and on the oldest numpy: ``nox``, or ``nox -s tests-3.10``.

``KVOFFLOAD_PURE_PYTHON`` acts as everywhere: ``0`` requires the extensions, ``1`` leaves them out.
"""

import nox

nox.needs_version = ">=2024.4.15"
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def install_and_test(session: nox.Session, *packages: str) -> None:
    """Build in place, as a contributor does; extensions of several Pythons stand side by side."""
    session.install("-e", ".[test]", *packages)
    session.run("python", "-m", "pytest", "-q", *session.posargs)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests on one Python."""
    install_and_test(session)


@nox.session(python="3.10")
def oldest_numpy(session: nox.Session) -> None:
    """Run the tests on the oldest numpy that the metadata allows."""
    install_and_test(session, "numpy==1.24.*")


@nox.session(python="3.11")
def soak(session: nox.Session) -> None:
    """Run the generated tests with a budget of hours; arguments go to pytest."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "--hypothesis-profile=soak", *session.posargs)
