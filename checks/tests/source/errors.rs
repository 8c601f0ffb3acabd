//! Checks the texts of errors: an error either has the text of its cause, or returns its cause as source.
//! With both, a program that prints an error with its sources would print the cause twice.

use syn::visit::Visit;
use syn::{Attribute, Fields, ItemStruct, Variant};

use crate::model::code;
use tonic_rdma_checks::{files_of, read, root};

#[test]
fn no_text_repeats_the_source() {
    let mut found = Texts::default();
    for file in files_of(root(), "rs").iter().filter(|file| read(file).contains("#[error(")) {
        found.visit_file(&syn::parse_file(&read(file)).unwrap());
    }
    assert!(found.texts > 50, "the errors are read: {}", found.texts);
    assert!(found.repeated.is_empty(), "these texts repeat the source:\n{}", found.repeated.join("\n"));
}

#[test]
fn a_text_that_repeats_its_source_is_found() {
    let mut found = Texts::default();
    let right = r#"#[error("at {0}")] A(String, #[source] Io), #[error("{x}")] B { x: Io }"#;
    let wrong =
        r#"#[error("at {x}: {source}")] C { x: u8, source: Io }, #[error("at {1:?}")] D(u8, #[from] Io)"#;
    found.visit_file(&syn::parse_file(&format!("enum E {{ {right}, {wrong} }}")).unwrap());
    assert_eq!((found.texts, found.repeated.len()), (4, 2));
}

/// The texts of errors, and those that have the text of their source.
#[derive(Default)]
struct Texts {
    texts: usize,
    repeated: Vec<String>,
}

impl Texts {
    fn check(&mut self, attributes: &[Attribute], fields: &Fields) {
        let Some(text) = attributes.iter().find(|found| found.path().is_ident("error")) else { return };
        let text = code(&text.meta);
        self.texts += 1;
        for (index, field) in fields.iter().enumerate() {
            let name = field.ident.as_ref().map_or_else(|| index.to_string(), ToString::to_string);
            let is = |of: &str| field.attrs.iter().any(|attribute| attribute.path().is_ident(of));
            let is_source = name == "source" || is("source") || is("from");
            if is_source && ["}", ":"].iter().any(|end| text.contains(&format!("{{{name}{end}"))) {
                self.repeated.push(text.clone());
            }
        }
    }
}

impl<'a> Visit<'a> for Texts {
    fn visit_variant(&mut self, variant: &'a Variant) {
        self.check(&variant.attrs, &variant.fields);
    }

    fn visit_item_struct(&mut self, item: &'a ItemStruct) {
        self.check(&item.attrs, &item.fields);
    }
}
