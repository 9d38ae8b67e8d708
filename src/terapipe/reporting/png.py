"""A picture as PNG, for places that do not take SVG."""

from importlib import import_module
from pathlib import Path
from types import ModuleType


def write_png(path: Path, svg_text: str, scale: float = 2.0) -> None:
    """``scale`` pixels for each unit of the picture. Brings its own font, so text shows on a machine without any."""
    resvg, font = _extra("resvg_py"), _extra("font_roboto")
    files = [str(Path(font.font_directory) / f"Roboto-{weight}.ttf") for weight in ("Regular", "Bold")]
    picture: bytes = resvg.svg_to_bytes(
        svg_string=svg_text, zoom=scale, skip_system_fonts=True, font_files=files, sans_serif_family="Roboto"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)


def require_png() -> None:
    """Raises ValueError where the extra is missing: before a picture is made, not after."""
    for name in ("resvg_py", "font_roboto"):
        _extra(name)


def _extra(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"PNG pictures need the module {name}; pip install 'terapipe[png]'") from None
