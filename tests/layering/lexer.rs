//! Cuts Rust source into words and signs; comments, strings and characters are left out.

/// A word or a sign, and the line that it is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) text: String,
    pub(crate) line: usize,
}

/// The tokens of `source`: identifiers and numbers as words, `::` as one sign, any other sign by itself.
pub(crate) fn tokens(source: &str) -> Vec<Token> {
    let mut lexer = Lexer { rest: source, line: 1, tokens: Vec::new() };
    while lexer.step() {}
    lexer.tokens
}

struct Lexer<'a> {
    rest: &'a str,
    line: usize,
    tokens: Vec<Token>,
}

impl Lexer<'_> {
    fn step(&mut self) -> bool {
        let Some(first) = self.rest.chars().next() else { return false };
        if self.rest.starts_with("//") {
            self.skip(self.rest.find('\n').unwrap_or(self.rest.len()));
        } else if self.rest.starts_with("/*") {
            self.skip(block_comment(self.rest));
        } else if let Some(length) =
            raw_string(self.rest).or_else(|| string(self.rest)).or_else(|| character(self.rest))
        {
            self.skip(length);
        } else if is_word(first) {
            let length = self.rest.find(|other| !is_word(other)).unwrap_or(self.rest.len());
            self.push(length);
        } else if self.rest.starts_with("::") {
            self.push(2);
        } else if first.is_whitespace() {
            self.skip(first.len_utf8());
        } else {
            self.push(first.len_utf8());
        }
        true
    }

    fn push(&mut self, length: usize) {
        self.tokens.push(Token { text: self.rest[..length].to_owned(), line: self.line });
        self.rest = &self.rest[length..];
    }

    fn skip(&mut self, length: usize) {
        self.line += self.rest[..length].matches('\n').count();
        self.rest = &self.rest[length..];
    }
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn block_comment(source: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < source.len() {
        let rest = &source[at..];
        if rest.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    source.len()
}

/// Length of `r"…"`, `r#"…"#`, `br"…"` and so on.
fn raw_string(source: &str) -> Option<usize> {
    let prefix = ["r", "br", "cr"].into_iter().find(|prefix| {
        source.strip_prefix(prefix).is_some_and(|rest| rest.trim_start_matches('#').starts_with('"'))
    })?;
    let hashes = source[prefix.len()..].len() - source[prefix.len()..].trim_start_matches('#').len();
    let start = prefix.len() + hashes + 1;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(source[start..].find(&end).map_or(source.len(), |at| start + at + end.len()))
}

/// Length of `"…"`, `b"…"`, `c"…"`.
fn string(source: &str) -> Option<usize> {
    let start = ["\"", "b\"", "c\""].into_iter().find(|prefix| source.starts_with(prefix))?.len();
    let mut escaped = false;
    for (at, character) in source[start..].char_indices() {
        match character {
            '"' if !escaped => return Some(start + at + 1),
            _ => escaped = character == '\\' && !escaped,
        }
    }
    Some(source.len())
}

/// Length of `'…'`; not of a lifetime.
fn character(source: &str) -> Option<usize> {
    let rest = source.strip_prefix('\'')?;
    if rest.starts_with('\\') {
        // After the escaped character, which may be a quote itself.
        return rest.get(2..)?.find('\'').map(|at| 1 + 2 + at + 1);
    }
    let inner = rest.chars().next()?.len_utf8();
    rest[inner..].starts_with('\'').then_some(1 + inner + 1)
}

#[cfg(test)]
mod tests {
    use super::tokens;

    fn words(source: &str) -> String {
        tokens(source).iter().map(|token| token.text.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn text_that_is_no_code_is_left_out() {
        assert_eq!(words("a // b\n/* c /* d */ e */ f"), "a f");
        assert_eq!(words(r##"a "b \" c" d r#"e " f"# g b"h" i"##), "a d g i");
        assert_eq!(words(r"a 'b' '\'' '\\' c '\u{1F600}' 'é' d"), "a c d");
        assert_eq!(words("fn a<'b>(c: &'b str) {}"), "fn a < ' b > ( c : & ' b str ) { }");
        assert_eq!(words("crate::a::{b,c}"), "crate :: a :: { b , c }");
    }

    #[test]
    fn lines_are_counted_through_comments_and_strings() {
        let found = tokens("/*\n\n*/ \"\n\" a\nb");
        assert_eq!(found.iter().map(|token| token.line).collect::<Vec<_>>(), [4, 5]);
    }
}
