EQ.board = () => {};
