//! Finds the messages that the book quotes in the code: reasons, errors and lines of the log.

use super::pages;

/// The pages that quote messages, and the heads of the columns that have them.
const PAGES: [&str; 2] = ["logs.md", "troubleshooting.md"];
const HEADS: [&str; 3] = ["message", "the reason says", "error"];

#[test]
fn every_message_is_the_code_s() {
    let code = joined(&pages::sources().into_iter().map(|(_, text)| text).collect::<String>());
    let (mut seen, mut missing) = (0, Vec::new());
    for page in PAGES.iter().flat_map(|name| pages::of_book(name)) {
        for (_, cells) in page.rows().into_iter().filter(|(head, _)| HEADS.contains(&&**head)) {
            seen += 1;
            let message = cells[0].trim_matches('`');
            let absent = pieces(message).filter(|piece| !code.contains(*piece));
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

/// Returns what stands between the parts of a message that differ.
fn pieces(message: &str) -> impl Iterator<Item = &str> {
    message.split('…').map(|piece| piece.trim_matches([' ', '(', ')'])).filter(|piece| !piece.is_empty())
}

/// Joins texts that the source has on several lines.
fn joined(source: &str) -> String {
    let mut parts = source.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}
