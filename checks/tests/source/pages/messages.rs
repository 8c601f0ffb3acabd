//! Looks up the messages that the book quotes (reasons, errors and lines of the log) in the code, and the code's warnings and errors on
//! the book's page of the log.

use std::collections::BTreeSet;

use tonic_rdma_checks::pages;

/// The pages that quote messages, and the heads of the columns with messages.
const PAGES: [&str; 2] = ["logs.md", "troubleshooting.md"];
const HEADS: [&str; 3] = ["message", "the reason says", "error"];

#[test]
fn every_message_is_in_the_code() {
    let code = joined(&pages::sources().into_iter().map(|(_, text)| text).collect::<String>());
    let code = code.replace('`', "");
    let (mut seen, mut missing) = (0, Vec::new());
    for page in PAGES.iter().flat_map(|name| pages::of_book(name)) {
        for (_, cells) in page.rows().into_iter().filter(|(head, _)| HEADS.contains(&&**head)) {
            seen += 1;
            let message = cells[0].replace('`', "");
            let absent = pieces(&message).filter(|piece| !code.contains(*piece));
            missing.extend(absent.map(|piece| format!("{}: {piece:?}", page.path.display())));
        }
    }
    assert!(missing.is_empty(), "the code does not say:\n{}", missing.join("\n"));
    assert!(seen > 40, "only {seen} messages were found: is this check broken?");
}

#[test]
fn a_message_is_found_piece_by_piece() {
    assert_eq!(pieces("asked for … bytes, … left; …").collect::<Vec<_>>(), ["asked for", "bytes,", "left;"]);
    assert_eq!(joined("\"one \\\n      two\""), "\"one two\"");
}

#[test]
fn every_warning_is_on_the_page_of_the_log() {
    let rows = pages::of_book("logs.md").into_iter().flat_map(|page| page.rows());
    let listed: BTreeSet<String> =
        rows.filter(|(head, _)| head == "message").map(|(_, cells)| cells[0].replace('`', "")).collect();
    let (mut seen, mut missing) = (0, Vec::new());
    for (path, text) in pages::sources() {
        for message in warnings(&joined(&text)) {
            seen += 1;
            if message.is_empty() || !listed.contains(&message) {
                missing.push(format!("{}: {message:?}", path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "logs.md lacks:\n{}", missing.join("\n"));
    assert!(seen > 35, "only {seen} warnings were found: is this check broken?");
}

#[test]
fn warnings_are_found_with_their_messages() {
    let found = |code: &str| warnings(code);
    assert_eq!(found(r#"tracing::warn!(path = "a", %error, "it {what} `ends`: {}", 1);"#), ["it … ends: …"]);
    assert_eq!(found("throttled!(\n    warn,\n    name = &*name,\n    \"late\"\n)"), ["late"]);
    assert_eq!(found("error!(%error); f(\"no message\")"), [""]);
    assert_eq!(found("debug!(\"one\"); throttled!(debug, \"two\"); compile_error!(\"three\")"), [""; 0]);
}

/// Returns the messages of the warnings and errors that `code` logs, without backticks and with `…` for parameters. A line without a
/// message gives an empty text.
fn warnings(code: &str) -> Vec<String> {
    let calls = ["warn!(", "error!(", "throttled!("].into_iter().flat_map(|call| {
        code.match_indices(call).map(move |(at, _)| (&code[..at], code[at + call.len()..].trim_start(), call))
    });
    let is_one = |(before, arguments, call): &(&str, &str, &str)| match *call {
        "throttled!(" => arguments.starts_with("warn,") || arguments.starts_with("error,"),
        _ => !before.ends_with(|letter: char| letter.is_alphanumeric() || letter == '_'),
    };
    calls.filter(is_one).map(|(_, arguments, _)| message(arguments)).collect()
}

/// Returns the text that is an argument of its own, and not the value of a field.
fn message(arguments: &str) -> String {
    let (mut depth, mut last, mut rest) = (0, ',', arguments.chars());
    while let Some(letter) = rest.next() {
        match letter {
            '"' => {
                let (mut text, mut escaped) = (String::new(), false);
                for letter in rest.by_ref() {
                    match letter {
                        '"' if !escaped => break,
                        '\\' if !escaped => escaped = true,
                        _ => {
                            text.push(letter);
                            escaped = false;
                        }
                    }
                }
                if depth == 0 && last == ',' {
                    return without_parameters(&text);
                }
            }
            '(' => depth += 1,
            ')' if depth == 0 => break,
            ')' => depth -= 1,
            _ => {}
        }
        if !letter.is_whitespace() {
            last = letter;
        }
    }
    String::new()
}

/// Returns the text of a format string with `…` for each parameter, and without backticks.
fn without_parameters(format: &str) -> String {
    let mut parts = format.split('{');
    let first = parts.next().unwrap_or_default().to_owned();
    let text =
        parts.fold(first, |text, part| text + "…" + part.split_once('}').map_or(part, |(_, rest)| rest));
    text.replace('`', "")
}

/// Returns the parts of a message between its parameters.
fn pieces(message: &str) -> impl Iterator<Item = &str> {
    message.split('…').map(|piece| piece.trim_matches([' ', '(', ')'])).filter(|piece| !piece.is_empty())
}

/// Joins texts that the source has on several lines.
fn joined(source: &str) -> String {
    let mut parts = source.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}
