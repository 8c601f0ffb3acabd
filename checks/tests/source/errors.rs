//! Checks the texts of errors: an error either has the text of its cause, or returns its cause as source. With both, a program that
//! prints an error with its sources would print the cause twice.

use syn::visit::Visit;
use syn::{Attribute, Fields, ItemStruct, LitStr, Variant};

use tonic_rdma_checks::{files_of, read, root};

#[test]
fn no_text_repeats_the_source() {
    let mut found = Texts::default();
    for file in files_of(root(), "rs") {
        found.file = file.strip_prefix(root()).unwrap().display().to_string();
        found.visit_file(&syn::parse_file(&read(&file)).unwrap());
    }
    assert!(found.texts > 200, "the errors are read: {}", found.texts);
    assert!(found.repeated.is_empty(), "these texts repeat the source:\n{}", found.repeated.join("\n"));
}

#[test]
fn a_text_that_repeats_its_source_is_found() {
    let repeated = |code: &str| {
        let mut found = Texts::default();
        found.visit_file(&syn::parse_file(code).unwrap());
        !found.repeated.is_empty()
    };
    assert!(repeated(r#"enum E { #[error("at {x}: {source}")] A { x: u8, source: Io } }"#));
    assert!(repeated(r#"enum E { #[error("at {0}")] A(#[from] Io) }"#));
    assert!(repeated(r#"#[error("at {1:?}")] struct S(u8, #[source] Io);"#));
    assert!(repeated(r#"enum E { #[error("at {inner}")] A { #[source] inner: Io } }"#));
    assert!(!repeated(
        r#"enum E { #[error("at {x}")] A { x: u8, source: Io }, #[error(transparent)] B(#[from] Io) }"#
    ));
    assert!(!repeated(
        r#"enum E { #[error("at {0}")] A(String, #[source] Io), #[error("{cause}")] B { cause: Io } }"#
    ));
}

/// The texts of errors, and those that have the text of their source.
#[derive(Default)]
struct Texts {
    file: String,
    texts: usize,
    repeated: Vec<String>,
}

impl Texts {
    fn check(&mut self, name: &str, attributes: &[Attribute], fields: &Fields) {
        let text = attributes.iter().find(|attribute| attribute.path().is_ident("error")).and_then(text_of);
        let Some(text) = text else { return };
        self.texts += 1;
        for (index, field) in fields.iter().enumerate() {
            let name_of_field = field.ident.as_ref().map_or_else(|| index.to_string(), ToString::to_string);
            let is = |name: &str| field.attrs.iter().any(|attribute| attribute.path().is_ident(name));
            let is_source = name_of_field == "source" || is("source") || is("from");
            let shown = [format!("{{{name_of_field}}}"), format!("{{{name_of_field}:")];
            if is_source && shown.iter().any(|shown| text.contains(shown)) {
                self.repeated.push(format!("{}: {name}: {text:?}", self.file));
            }
        }
    }
}

impl<'a> Visit<'a> for Texts {
    fn visit_variant(&mut self, variant: &'a Variant) {
        self.check(&variant.ident.to_string(), &variant.attrs, &variant.fields);
    }

    fn visit_item_struct(&mut self, item: &'a ItemStruct) {
        self.check(&item.ident.to_string(), &item.attrs, &item.fields);
    }
}

/// Returns the text of an attribute `error("…", …)`.
fn text_of(attribute: &Attribute) -> Option<String> {
    let first = |input: syn::parse::ParseStream<'_>| {
        let text: LitStr = input.parse()?;
        input.step(|cursor| {
            let mut rest = *cursor;
            while let Some((_, next)) = rest.token_tree() {
                rest = next;
            }
            Ok(((), rest))
        })?;
        Ok(text.value())
    };
    attribute.parse_args_with(first).ok()
}
