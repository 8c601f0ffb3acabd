//! Values of the command line, and their texts: sizes, times, lists.

use std::time::Duration;

const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// The largest size of an operand.
pub(crate) const MAX_BYTES: u64 = 4 << 30;
/// The longest time for one cell.
const MAX_SECONDS: f64 = 3600.0;

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
    #[error(
        "bad size {0:?}; accepted: a number of bytes up to 4GiB, optionally with B, KiB, MiB or GiB (64, 4KiB, 1MiB)"
    )]
    Size(String),
    #[error("bad duration {0:?}; accepted: seconds from 0.001 to 3600")]
    Seconds(String),
}

/// The values of a list with commas: at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

/// How many ranks are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trials {
    Number(u64),
    /// One for each step.
    All,
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

/// Parses a whole number from `least` to `most`.
pub(crate) fn parse_number(text: &str, least: u64, most: u64) -> Result<u64, ValueError> {
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Ok(number)
        }
        _ => Err(ValueError::Number { given: text.to_owned(), least, most }),
    }
}

/// Parses a number of bytes: `64`, `4KiB`, `1 MiB`.
pub(crate) fn parse_size(text: &str) -> Result<u64, ValueError> {
    let refused = || ValueError::Size(text.to_owned());
    let (number, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    let unit = unit.trim();
    let factor = match UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) {
        Some((_, factor)) => *factor,
        None if unit.is_empty() || unit.eq_ignore_ascii_case("B") => 1,
        None => return Err(refused()),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    bytes.filter(|bytes| *bytes <= MAX_BYTES).ok_or_else(refused)
}

/// Parses seconds: `0.2`, `5`.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, ValueError> {
    match text.parse::<f64>() {
        Ok(seconds) if (1e-3..=MAX_SECONDS).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(ValueError::Seconds(text.to_owned())),
    }
}

/// Formats `bytes` in the largest unit that divides it: `64 B`, `4 KiB`, `1 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    match UNITS.iter().find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{} {name}", bytes / unit),
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
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_parsed() {
        for (text, bytes) in
            [("64", 64), ("8B", 8), ("4KiB", 4096), ("1 mib", 1 << 20), ("0", 0), ("4GiB", MAX_BYTES)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
        }
        for text in ["", "KiB", "-1", "1.5MiB", "4KB", "5GiB", "99999999999999999999", "17179869184GiB", "١"]
        {
            assert_eq!(parse_size(text), Err(ValueError::Size(text.to_owned())), "{text:?}");
        }
    }

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
        assert_eq!([digits(99.96), digits(0.0), digits(0.0123)], ["100", "0", "0.0123"]);
    }

    proptest! {
        #[test]
        fn a_size_that_is_written_is_read_back(bytes in 0..=MAX_BYTES, shift in 0u32..32) {
            let bytes = bytes >> shift << shift;
            prop_assert_eq!(parse_size(&size(bytes)), Ok(bytes));
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text in "\\PC*") {
            let _ = parse_size(&text);
            let _ = parse_seconds(&text);
            let _ = parse_number(&text, 0, 9);
        }
    }
}
