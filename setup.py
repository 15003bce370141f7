"""The package list: the folder ``src`` is the package ``epicute``; pyproject.toml says the rest.

Discovery by name would find ``src`` and ``tests`` or, in an sdist, which does not carry the root
link, nothing at all. So the list is computed from ``src`` itself.
"""

from setuptools import find_packages, setup

setup(
    package_dir={"epicute": "src"},
    packages=["epicute", *(f"epicute.{name}" for name in find_packages("src"))],
)
