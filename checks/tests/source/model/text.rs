//! Reads attributes, visibilities and documentation, and writes code as rustfmt would.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Expr, Ident, Item, Lit, LitStr, Meta, Visibility};

/// Returns true for `pub`, and false for `pub(crate)` and the like.
pub(crate) fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Returns the name, the attributes and the visibility of an item, as far as it has them.
pub(super) fn parts(item: &Item) -> (Option<&Ident>, &[Attribute], &Visibility) {
    const NONE: &Visibility = &Visibility::Inherited;
    match item {
        Item::Const(item) => (Some(&item.ident), &item.attrs, &item.vis),
        Item::Enum(item) => (Some(&item.ident), &item.attrs, &item.vis),
        Item::Fn(item) => (Some(&item.sig.ident), &item.attrs, &item.vis),
        Item::Impl(item) => (None, &item.attrs, NONE),
        Item::Macro(item) => (item.ident.as_ref(), &item.attrs, NONE),
        Item::Static(item) => (Some(&item.ident), &item.attrs, &item.vis),
        Item::Struct(item) => (Some(&item.ident), &item.attrs, &item.vis),
        Item::Trait(item) => (Some(&item.ident), &item.attrs, &item.vis),
        Item::Type(item) => (Some(&item.ident), &item.attrs, &item.vis),
        Item::Union(item) => (Some(&item.ident), &item.attrs, &item.vis),
        Item::Use(item) => (None, &item.attrs, &item.vis),
        _ => (None, &[], NONE),
    }
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

/// Pairs of texts: what quote writes, and what rustfmt writes instead.
const NARROW: &[&str] = &[
    " :: ", "::", ":: ", "::", " ::", "::", "- >", "->", " (", "(", "( ", "(", " )", ")", "[ ", "[", " ]",
    "]", " < ", "<", "< ", "<", " <", "<", " >", ">", " ,", ",", " ;", ";", " :", ":", "& ", "&", "* ", "*",
    "' ", "'", " ?", "?", "? ", "?", "# ", "#", " !", "!", ",)", ")", ",>", ">",
    // The pairs above remove some blanks that rustfmt writes, so these pairs put them back.
    "->", " -> ", "  ", " ", "=(", "= (", ":(", ": (", ":&", ": &", ":[", ": [", ":?", ": ?", "  ", " ",
];

/// Returns `part` as code on one line, with blanks where rustfmt writes them.
pub(crate) fn code(part: &impl ToTokens) -> String {
    let text = part.to_token_stream().to_string();
    NARROW.chunks(2).fold(text, |text, pair| text.replace(pair[0], pair[1]))
}

/// Returns the calls of macros in a file, those within other calls included: the last name of the macro, and
/// its tokens.
pub(crate) fn macro_calls(text: &str) -> Vec<(String, Vec<TokenTree>)> {
    fn collect(tokens: TokenStream, calls: &mut Vec<(String, Vec<TokenTree>)>) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            let TokenTree::Group(group) = token else { continue };
            if let [.., TokenTree::Ident(name), TokenTree::Punct(mark)] = &tokens[..at]
                && mark.as_char() == '!'
            {
                calls.push((name.to_string(), group.stream().into_iter().collect()));
            }
            collect(group.stream(), calls);
        }
    }
    let mut calls = Vec::new();
    collect(text.parse().unwrap(), &mut calls);
    calls
}

/// Returns the text of a string literal.
pub(crate) fn string(token: &TokenTree) -> Option<String> {
    syn::parse2::<LitStr>(token.clone().into()).ok().map(|text| text.value())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_written_as_rustfmt_writes_it() {
        for text in [
            "async fn e(f: Box<dyn Fn(u8) -> u16 + Send>, b: &'a [T; 2]) -> io::Result<Self>",
            "fn g<T: ?Sized>(&mut self, h: *const T) -> impl Iterator<Item = (u8, T::Output)> where T: Clone",
        ] {
            let signature: syn::Signature = syn::parse_str(text).unwrap();
            assert_eq!(code(&signature), text);
        }
    }
}
