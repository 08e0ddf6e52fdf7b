"""Molecules as graphs, from SMILES without charges and stereochemistry, for `graphs.py`."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

# Valences of the elements.
ELEMENTS = {
    "C": (4,),
    "N": (3, 5),
    "O": (2,),
    "S": (2, 4, 6),
    "P": (3, 5),
    "F": (1,),
    "Cl": (1,),
    "Br": (1,),
    "I": (1,),
}
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|[CNOSPFI]|[cnosp]|[-=#()]|\d")


Molecule = tuple[np.ndarray, np.ndarray]  # the bonds (n, n) and the features of the atoms (n, d)


def read_molecules(path: Path) -> list[tuple[Molecule, float]]:
    """Return the molecules of several atoms, and the numbers, of the columns smiles and expt of a CSV file."""
    with path.open(encoding="utf-8") as stream:
        rows = [(molecule(row["smiles"]), float(row["expt"])) for row in csv.DictReader(stream)]
    return [(made, number) for made, number in rows if len(made[1]) > 1]


def molecule(smiles: str) -> Molecule:
    """Return the bonds (n, n) and the features of the atoms: element, aromatic, hydrogens, neighbours."""
    atoms, bonds, branches, rings, last, order = [], [], [], {}, -1, 1
    for token in TOKEN.findall(smiles):
        if token == "(":
            branches.append(last)
        elif token == ")":
            last = branches.pop()
        elif token in "-=#":
            order = "-=#".index(token) + 1
        elif token.isdigit():
            if token in rings:
                other, earlier = rings.pop(token)
                bonds.append((other, last, max(order, earlier)))
            else:
                rings[token] = (last, order)
            order = 1
        else:
            atoms.append(token)
            bonds += [(last, len(atoms) - 1, order)] if last >= 0 else []
            last, order = len(atoms) - 1, 1
    adjacency, rows = np.zeros((len(atoms), len(atoms))), []
    for a, b, order in bonds:
        adjacency[a, b] = adjacency[b, a] = order
    for token, used, degree in zip(atoms, adjacency.sum(1), (adjacency > 0).sum(1), strict=True):
        name, count = re.match(r"\[?(Br|Cl|[A-Za-z])", token)[1], re.search(r"H(\d?)", token)  # type: ignore[index]
        free = min((v for v in ELEMENTS[name.capitalize()] if v >= used), default=used) - used - name.islower()
        hydrogens = (int(count[1] or 1) if count else 0) if token[0] == "[" else max(free, 0) * (name not in "nos")
        rows.append([*(name.capitalize() == element for element in ELEMENTS), name.islower(), hydrogens, degree])
    return (adjacency > 0).astype(float), np.array(rows, dtype=float)
