"""octavo beside other engines, on one machine, in turn: `python -m benches.peers`."""
