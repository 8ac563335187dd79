import verifiers.v1 as vf
from pydantic import Field

NUMBERS = {"ann": "4", "bob": "7"}


class BookState(vf.State):
    looked_up: list[str] = Field(default_factory=list)


class PhoneBook(vf.Toolset[vf.SharedToolsetConfig, BookState]):
    TOOL_PREFIX = "book"

    @vf.tool
    def look(self, who: str) -> str:
        """The number of a person."""
        self.state.looked_up.append(who)
        return NUMBERS.get(who, "nobody")


if __name__ == "__main__":
    PhoneBook.run()
