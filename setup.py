"""The package list: the folder ``src`` is the package ``epicute``; pyproject.toml says the rest.

Discovery by name would find ``src`` and ``tests`` or, in an sdist, which does not carry the links,
nothing at all. So the list is computed from ``src`` itself.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

LINK = Path("editable", "epicute")
"""A link to ``src`` in a folder of its own, which an editable installation puts on ``sys.path``."""


class OnPath(editable_wheel):
    """An editable installation as a path entry.

    A package that is renamed would otherwise be found by a finder behind ``sys.path``: a script
    beside a clone of the default name would see the clone's folder first, as an empty namespace.
    On the path a package goes before a namespace. The root itself would bring ``tests`` along.
    """

    def finalize_options(self) -> None:
        if (LINK / "__init__.py").is_file():
            self.distribution.package_dir = {"": str(LINK.parent)}
        super().finalize_options()


setup(
    package_dir={"epicute": "src"},
    packages=["epicute", *(f"epicute.{name}" for name in find_packages("src"))],
    cmdclass={"editable_wheel": OnPath},
)
