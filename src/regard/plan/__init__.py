"""From a call to a plan: pose the problem, schedule the tiles, lower the problem. No attention is computed here."""
