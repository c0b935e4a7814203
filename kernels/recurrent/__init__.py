"""Operations that go through a request's tokens one after the other and keep a state of one size."""
