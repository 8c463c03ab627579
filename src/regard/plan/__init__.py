"""From a call to a plan: pose the problem, schedule the tiles, choose the engine. Nothing is computed here."""
