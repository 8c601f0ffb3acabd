//! Reads attributes, visibilities and documentation, and writes code as rustfmt would.

use quote::ToTokens;
use syn::{Attribute, Expr, Lit, Meta, Visibility};

/// Returns true for `pub`, and false for `pub(crate)` and the like.
pub(crate) fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Returns true for an attribute of items that only tests have.
pub(super) fn is_test(attribute: &Attribute) -> bool {
    let text = code(&attribute.meta);
    text == "cfg(test)" || text.starts_with("cfg(all(test,") || text == "test"
}

/// Returns true for `#[doc(hidden)]`.
pub(super) fn is_hidden(attribute: &Attribute) -> bool {
    code(&attribute.meta) == "doc(hidden)"
}

/// Returns the documentation among `attributes`, a line for each of its lines.
pub(crate) fn docs(attributes: &[Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes {
        if let Meta::NameValue(pair) = &attribute.meta
            && pair.path.is_ident("doc")
            && let Expr::Lit(literal) = &pair.value
            && let Lit::Str(line) = &literal.lit
        {
            let line = line.value();
            text += line.strip_prefix(' ').unwrap_or(&line);
            text.push('\n');
        }
    }
    text
}

/// Returns a piece of code on one line, with blanks where rustfmt has them.
pub(crate) fn code(piece: &impl ToTokens) -> String {
    let mut text = piece.to_token_stream().to_string();
    for (wide, narrow) in [
        (" :: ", "::"),
        (":: ", "::"),
        (" ::", "::"),
        ("- >", "->"),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        ("[ ", "["),
        (" ]", "]"),
        (" < ", "<"),
        ("< ", "<"),
        (" <", "<"),
        (" >", ">"),
        (" ,", ","),
        (" ;", ";"),
        (" :", ":"),
        ("& ", "&"),
        ("* ", "*"),
        ("' ", "'"),
        (" ?", "?"),
        ("? ", "?"),
        ("# ", "#"),
        (" !", "!"),
        (",)", ")"),
        (",>", ">"),
    ] {
        text = text.replace(wide, narrow);
    }
    // Puts back the blanks that the replacements above removed and rustfmt has.
    for (narrow, wide) in [
        ("->", " -> "),
        ("  ", " "),
        ("=(", "= ("),
        (":(", ": ("),
        (":&", ": &"),
        (":[", ": ["),
        (":?", ": ?"),
    ] {
        text = text.replace(narrow, wide);
    }
    text = text.replace("  ", " ");
    text
}

/// Returns the tokens of a macro without string literals, such as documentation.
pub(crate) fn without_strings(tokens: &str) -> String {
    let (mut text, mut in_string, mut escaped) = (String::new(), false, false);
    for letter in tokens.chars() {
        match letter {
            '"' if !escaped => in_string = !in_string,
            _ if !in_string => text.push(letter),
            _ => {}
        }
        escaped = in_string && letter == '\\' && !escaped;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_written_as_rustfmt_writes_it() {
        for text in [
            "fn a(&mut self, b: impl Into<Vec<u8>>) -> Result<(), Error>",
            "fn b<'a, T: Send + 'static>(c: &'a [T; 2], d: Option<&'a str>) -> (u8, u16)",
            "async fn e(f: Box<dyn Fn(u8) -> u16 + Send>) -> io::Result<Self>",
            "fn g<T: ?Sized>(h: *const T) -> impl Iterator<Item = (u8, T::Output)> where T: Clone",
        ] {
            let signature: syn::Signature = syn::parse_str(text).unwrap();
            assert_eq!(code(&signature), text);
        }
    }
}
