//! Looks up the messages that the book quotes (reasons, errors and lines of the log) in the code, and the
//! code's warnings and errors on the book's page of the log.

use std::collections::BTreeSet;

use proc_macro2::TokenTree;
use tonic_rdma_checks::pages;

use crate::model::{macro_calls, string};

/// The pages that quote messages, and the headers of the columns with messages.
const PAGES: [&str; 2] = ["logs.md", "troubleshooting.md"];
const HEADERS: [&str; 3] = ["message", "the reason says", "error"];

#[test]
fn every_message_is_in_the_code() {
    let source: String = pages::sources().into_iter().map(|(_, text)| text).collect();
    // Texts may go on in the next line.
    let code: String = source.split("\\\n").map(str::trim_start).collect::<String>().replace('`', "");
    let (mut seen, mut missing) = (0, Vec::new());
    for page in PAGES.iter().flat_map(|name| pages::of_book(name)) {
        for (_, cells) in page.rows().into_iter().filter(|(header, _)| HEADERS.contains(&&**header)) {
            seen += 1;
            let message = cells[0].replace('`', "");
            let parts = message.split('…').map(|part| part.trim_matches([' ', '(', ')']));
            let absent = parts.filter(|part| !code.contains(part));
            missing.extend(absent.map(|part| format!("{}: {part:?}", page.path.display())));
        }
    }
    assert!(missing.is_empty(), "the code does not say:\n{}", missing.join("\n"));
    assert!(seen > 40, "only {seen} messages were found: is this check broken?");
}

#[test]
fn every_warning_is_on_the_page_of_the_log() {
    let rows = pages::of_book("logs.md").into_iter().flat_map(|page| page.rows());
    let listed: BTreeSet<String> =
        rows.filter(|(header, _)| header == "message").map(|(_, cells)| cells[0].replace('`', "")).collect();
    let (mut seen, mut missing) = (0, Vec::new());
    for (path, text) in pages::sources() {
        for message in warnings(&text) {
            seen += 1;
            if !listed.contains(&message) {
                missing.push(format!("{}: {message:?}", path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "logs.md lacks:\n{}", missing.join("\n"));
    assert!(seen > 35, "only {seen} warnings were found: is this check broken?");
}

#[test]
fn warnings_are_found_with_their_messages() {
    assert_eq!(
        warnings(r#"tracing::warn!(path = "a", %error, "it {what} `ends`: {}", 1);"#),
        ["it … ends: …"]
    );
    assert_eq!(
        warnings("select! { throttled!(\n    warn,\n    name = &*name,\n    \"la\\\n  te\"\n) }"),
        ["late"]
    );
    assert_eq!(warnings("error!(%error); f(\"no message\")"), [""]);
    assert_eq!(warnings("debug!(\"one\"); throttled!(debug, \"two\"); compile_error!(\"three\")"), [""; 0]);
}

/// Returns the messages of the warnings and errors that `code` logs, without backticks and with `…` for
/// parameters. A line without a message gives an empty text.
fn warnings(code: &str) -> Vec<String> {
    let is_level = |name: &str| ["warn", "error"].contains(&name);
    let calls = macro_calls(code).into_iter().filter(|(name, arguments)| {
        is_level(name) || name == "throttled" && arguments.first().is_some_and(|of| is_level(&of.to_string()))
    });
    let message = |(_, arguments): (String, Vec<TokenTree>)| {
        let is_own = |at: usize| at == 0 || arguments[at - 1].to_string() == ",";
        let texts = arguments.iter().enumerate().filter(|(at, _)| is_own(*at));
        let format = texts.filter_map(|(_, token)| string(token)).next().unwrap_or_default().replace('`', "");
        let mut parts = format.split('{');
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |text, part| text + "…" + part.split_once('}').map_or(part, |(_, rest)| rest))
    };
    calls.map(message).collect()
}
