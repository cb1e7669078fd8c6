"""What the demo's model reads: four sentences on each of twelve subjects.

A person can judge the nearest neighbours at a glance: they should be on the same subject. Two of
the four say nearly the same in other words, the other two are only about the same things.
"""

from __future__ import annotations

BY_SUBJECT: dict[str, tuple[str, str, str, str]] = {
    "weather": (
        "Heavy rain is expected along the coast tomorrow morning.",
        "The forecast says it will pour near the sea early in the day.",
        "The wind has turned north and the nights are getting colder.",
        "Fog kept the harbour closed until noon.",
    ),
    "bread": (
        "Let the dough rise in a warm place until it has doubled.",
        "Leave the bread mixture somewhere warm so that it grows to twice its size.",
        "A hot oven and a little steam give the loaf its crust.",
        "Rye flour makes a heavier bread than wheat.",
    ),
    "space": (
        "The probe sent back pictures of the icy moon of Jupiter.",
        "A spacecraft has photographed one of Jupiter's frozen satellites.",
        "The comet will be visible without a telescope in October.",
        "Light from that galaxy left it before our sun was born.",
    ),
    "football": (
        "The goalkeeper saved a penalty in the last minute.",
        "Seconds before the final whistle the keeper stopped the spot kick.",
        "Two defenders are injured and will miss the cup final.",
        "The referee sent the captain off for a second yellow card.",
    ),
    "music": (
        "The violinist tuned her instrument before the concert.",
        "Before playing, the musician adjusted the strings of her violin.",
        "The choir sang the last movement without the orchestra.",
        "He has been learning the piano since he was four.",
    ),
    "money": (
        "The central bank raised its interest rate by a quarter of a point.",
        "Borrowing became dearer after the bank lifted rates slightly.",
        "Shares fell when the company cut its forecast of profits.",
        "She pays back her mortgage in monthly instalments.",
    ),
    "medicine": (
        "The doctor prescribed antibiotics for the infection.",
        "To treat the infected wound the physician gave her antibiotics.",
        "High blood pressure often causes no symptoms at all.",
        "The nurse took a blood sample and sent it to the laboratory.",
    ),
    "garden": (
        "Prune the roses in early spring before new shoots appear.",
        "Cut back rose bushes at the end of winter, ahead of fresh growth.",
        "Tomatoes need plenty of sun and water at their roots.",
        "Slugs have eaten all the young lettuce.",
    ),
    "computers": (
        "The program crashed because it ran out of memory.",
        "There was no free memory left, so the application stopped.",
        "The compiler warns about variables that are never used.",
        "He backed up the database before installing the update.",
    ),
    "trains": (
        "The night train to Vienna leaves from platform nine.",
        "From platform nine you can take the sleeper to Vienna.",
        "A broken signal delayed every train on the line.",
        "The conductor checks the tickets after the first stop.",
    ),
    "birds": (
        "Swallows fly south to Africa before the winter.",
        "In autumn the swallows migrate to warmer African countries.",
        "An owl has nested in the roof of the old barn.",
        "The blackbird feeds its young on worms and berries.",
    ),
    "law": (
        "The court ruled that the contract was not valid.",
        "Judges decided the agreement could not be enforced.",
        "The witness refused to answer the lawyer's question.",
        "Parliament passed the new law on data protection.",
    ),
}

ALL: tuple[str, ...] = tuple(text for group in BY_SUBJECT.values() for text in group)
