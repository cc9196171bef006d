from .tuning.timing import configure as configure

__all__ = ["configure"]
