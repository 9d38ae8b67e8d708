"""In what order: actions, the rule of precedence, orders and timelines. No torch here."""
