"""``terapipe doctor``: gathers facts about ranks, hosts and links, and says what to do about what is wrong."""
