"""A small table of facts for a model to look into."""

from __future__ import annotations

from ....ipc.errors import did_you_mean, shorten

_CAPITALS = {
    "argentina": "Buenos Aires",
    "australia": "Canberra",
    "austria": "Vienna",
    "belgium": "Brussels",
    "brazil": "Brasilia",
    "canada": "Ottawa",
    "china": "Beijing",
    "denmark": "Copenhagen",
    "egypt": "Cairo",
    "finland": "Helsinki",
    "france": "Paris",
    "germany": "Berlin",
    "greece": "Athens",
    "india": "New Delhi",
    "italy": "Rome",
    "japan": "Tokyo",
    "kenya": "Nairobi",
    "mexico": "Mexico City",
    "norway": "Oslo",
    "poland": "Warsaw",
    "portugal": "Lisbon",
    "spain": "Madrid",
    "sweden": "Stockholm",
    "turkey": "Ankara",
}
FACTS = {f"capital of {country}": city for country, city in _CAPITALS.items()} | {
    "boiling point of water": "100 degrees",
    "currency of japan": "yen",
    "currency of poland": "zloty",
    "height of mount everest": "8849 m",
    "length of the nile": "6650 km",
    "number of planets": "8",
    "speed of light": "299792458 m/s",
    "speed of sound": "343 m/s",
}
_MAX_LENGTH = 200


def find_fact(key: str) -> str:
    """The fact of that name, in upper or lower case. Raises ValueError, with a hint, where there is none."""
    name = " ".join(key[:_MAX_LENGTH].casefold().removeprefix("the ").rstrip("?. ").split())
    if name not in FACTS:
        raise ValueError(f"nothing is known of {shorten(key)}{did_you_mean(name, FACTS)}")
    return FACTS[name]
