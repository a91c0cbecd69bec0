"""What setup.cfg cannot say: the optional library of kernels/native, and README for the package index."""

import os
import re
import sys
import zlib
from configparser import ConfigParser
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# The first flags let the compiler use vector instructions; none lets it change the order of a sum. Without the last one
# processors with and without fused multiplication would round differently. MSVC gets its default flags.
FLAGS = ["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
STRIP = {"linux": ["-Wl,-s"], "darwin": ["-Wl,-x"]}  # by the linker, because the record has the size of the library

RECORD = ".record"
PASSES = ["smooth_ap", "smooth_ap_of_rows", "ndcg", "soft_maximum", "unit_rows", "unit_gradient"]
PASSES += ["cross_entropy", "sigmoid_of_pairs", "cross_entropy_of_labels", "moments", "evaluate", "rates"]  # of bins


class BuildLibrary(build_ext):
    """Builds a library for ``ctypes``, not a module: its name must not look like one.

    A record next to the library has its size and the checksum of its sources, which kernels/native compares.
    """

    def build_extension(self, ext: Extension) -> None:
        super().build_extension(ext)
        library = Path(self.get_ext_fullpath(ext.name))
        checksum = zlib.crc32(b"".join(Path(name).read_bytes() for name in sorted([*ext.sources, *ext.depends])))
        library.with_suffix(RECORD).write_text(f"{library.stat().st_size} {checksum}\n", "ascii")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for ext in self.extensions:
            record = Path(self.build_lib, self.get_ext_filename(ext.name)).with_suffix(RECORD)
            if record.exists():
                self.copy_file(str(record), str(Path(self.get_ext_fullpath(ext.name)).with_suffix(RECORD)))

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".library"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols


class BuildWheel(bdist_wheel):
    """One wheel for every Python of a platform: the library has no ABI of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BuildModules(build_py):
    """Leaves this file out, which lies in the folder of the package."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [found for found in super().find_package_modules(package, package_dir) if found[1] != "setup"]


def long_description(home: str) -> str:
    """Return README with absolute links, which the package index needs for its picture and its pages."""
    readme = Path("README.md").read_text("utf-8")
    readme = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{home}/raw/main/", readme)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{home}/blob/main/", readme)


library = Extension(
    "fullrank.kernels.native.sums",
    ["kernels/native/sums.c"],
    depends=[f"kernels/native/{name}.inc" for name in ("bins", "contrast", "pairs", "rows", "soft_maximum")],
    extra_compile_args=[] if sys.platform == "win32" else FLAGS,
    extra_link_args=STRIP.get(sys.platform, []),
    export_symbols=[f"{name}_float{bits}" for name in PASSES for bits in (32, 64)],
    optional=True,  # without a compiler torch computes the same
)
config = ConfigParser()
config.read("setup.cfg", encoding="utf-8")
home = config["metadata"]["url"]
setup(
    long_description=long_description(home),
    project_urls={"Changelog": f"{home}/blob/main/CHANGELOG.md", "Issues": f"{home}/issues", "Source": home},
    ext_modules=[library],
    cmdclass={"bdist_wheel": BuildWheel, "build_ext": BuildLibrary, "build_py": BuildModules},
)
