//! Values of the command line, and figures for people.

use std::time::Duration;

/// The reason why a value is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("an item of the list is empty")]
    EmptyItem,
    #[error("{0:?} is there twice")]
    Repeated(String),
    #[error("unknown {kind} {given:?}; accepted: {accepted}")]
    Unknown { kind: &'static str, given: String, accepted: String },
    #[error("bad number {given:?}; accepted: whole numbers from {least} to {most}")]
    Number { given: String, least: u64, most: u64 },
    #[error("bad duration {0:?}; accepted: seconds from 0.1 to 86400")]
    Seconds(String),
}

/// The values of a list with commas: at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

/// Parses a list.
pub(crate) fn parse_list<T>(
    text: &str,
    item: impl Fn(&str) -> Result<T, ValueError>,
) -> Result<List<T>, ValueError> {
    let parse = |part: &str| match part.trim() {
        "" => Err(ValueError::EmptyItem),
        part => item(part),
    };
    text.split(',').map(parse).collect::<Result<_, _>>().map(List)
}

/// Parses a list in which no value is there twice.
pub(crate) fn parse_set<T: PartialEq>(
    text: &str,
    item: impl Fn(&str) -> Result<T, ValueError>,
) -> Result<List<T>, ValueError> {
    let List(values) = parse_list(text, item)?;
    for (index, value) in values.iter().enumerate() {
        if values[..index].contains(value) {
            let given = text.split(',').nth(index).unwrap_or_default();
            return Err(ValueError::Repeated(given.trim().to_owned()));
        }
    }
    Ok(List(values))
}

/// Parses a whole number from `least` to `most`.
pub(crate) fn parse_number(text: &str, least: u64, most: u64) -> Result<u64, ValueError> {
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Ok(number)
        }
        _ => Err(ValueError::Number { given: text.to_owned(), least, most }),
    }
}

/// Parses seconds: `0.5`, `120`.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, ValueError> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(ValueError::Seconds(text.to_owned())),
    }
}

/// Formats a number of bytes: `64 B`, `4.00 KiB`, `1.53 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{} {name}", digits(bytes as f64 / *unit as f64)),
        None => format!("{bytes} B"),
    }
}

/// Formats microseconds with a unit that keeps them readable: `11.5 µs`, `1.70 ms`, `2.10 s`.
pub(crate) fn micros(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{} s", digits(v / 1e6)),
        v if v >= 1e3 => format!("{} ms", digits(v / 1e3)),
        v => format!("{} µs", digits(v)),
    }
}

/// Formats three significant digits, without an exponent.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.0995 => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn lists_have_no_empty_and_no_repeated_items() {
        let number = |text: &str| parse_number(text, 1, 9);
        assert_eq!(parse_set("1, 2", number), Ok(List(vec![1, 2])));
        assert_eq!(parse_set("1,,2", number), Err(ValueError::EmptyItem));
        assert_eq!(parse_set("", number), Err(ValueError::EmptyItem));
        assert_eq!(parse_set("3,1,3", number), Err(ValueError::Repeated("3".to_owned())));
        assert_eq!(parse_list("3,1,3", number), Ok(List(vec![3, 1, 3])));
        assert!(matches!(parse_list("10", number), Err(ValueError::Number { most: 9, .. })));
    }

    #[test]
    fn figures_keep_three_digits() {
        assert_eq!(
            [micros(0.17), micros(11.52), micros(1_700.0), micros(2.1e6)],
            ["0.17 µs", "11.5 µs", "1.70 ms", "2.10 s"]
        );
        assert_eq!([size(64), size(4096), size(1_605_632)], ["64 B", "4.00 KiB", "1.53 MiB"]);
        assert!(parse_seconds("0").is_err() && parse_seconds("nan").is_err());
    }
}
