"""The text that `regard inspect` reads when it is given none."""

# It is made to show things: names that come back (Calloway, Pell Point), a clause said twice, and a quotation that
# breaks off in the middle of its second telling, which a head that copies can finish.
SAMPLE = (
    "Anna and Tom Calloway kept the lighthouse at Pell Point for thirty-one years. Every evening Tom Calloway climbed "
    "the two hundred and six steps, wound the clockwork, and lit the lamp; every morning Anna Calloway wrote the "
    'weather in the log. "Wind from the north-west," she wrote, "sea moderate, one sail." When the lamp was made '
    "electric and the clockwork taken away, Tom Calloway still climbed the two hundred and six steps every evening, "
    "because, he said, somebody ought to look at the sea. The log of that year is still in the museum at Pell Point. "
    'On its last page Anna Calloway wrote: "Wind from the north-west, sea moderate,'
)
