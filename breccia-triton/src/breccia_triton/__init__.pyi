from .tuning import configure as configure

__all__ = ["configure"]
