//! Sizes and times as people write them: parsers and formatters.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::value_error::ValueError;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The forms that [`parse_size`] accepts, for messages.
pub const SIZE_FORMS: &str = "a whole number of bytes, optionally with B, KiB, MiB or GiB (64, 4KiB, 1GiB)";

/// The reason why a text is not a size.
#[expect(missing_docs, reason = "the texts say what each is")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("the size is empty")]
    Empty,
    #[error("the unit is unknown or the number is not a whole one")]
    Form,
    #[error("it is beyond what 64 bits hold")]
    Overflow,
}

/// Parses a number of bytes: `64`, `4KiB`, `1 MiB`, `1gib`.
///
/// # Errors
///
/// Fails if `text` has no whole number, an unknown unit, or more than 64 bits hold.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    if text.is_empty() {
        return Err(SizeError::Empty);
    }
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(SizeError::Form);
    }
    let factor = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => KIB,
        "mib" => MIB,
        "gib" => GIB,
        _ => return Err(SizeError::Form),
    };
    // Only the magnitude can be wrong, because these are digits.
    let number: u64 = number.parse().map_err(|_| SizeError::Overflow)?;
    number.checked_mul(factor).ok_or(SizeError::Overflow)
}

/// Formats `bytes` in the largest unit that divides it: `64 B`, `4 KiB`, `1 GiB`.
pub fn size(bytes: u64) -> String {
    match bytes {
        0 => "0 B".to_owned(),
        _ if bytes.is_multiple_of(GIB) => format!("{} GiB", bytes / GIB),
        _ if bytes.is_multiple_of(MIB) => format!("{} MiB", bytes / MIB),
        _ if bytes.is_multiple_of(KIB) => format!("{} KiB", bytes / KIB),
        _ => format!("{bytes} B"),
    }
}

/// Formats `bytes` with three digits, for measured amounts: `7.9 GiB`.
pub fn rough_size(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        GIB.. => format!("{} GiB", digits(value / GIB as f64)),
        MIB.. => format!("{} MiB", digits(value / MIB as f64)),
        KIB.. => format!("{} KiB", digits(value / KIB as f64)),
        _ => format!("{bytes} B"),
    }
}

/// Formats microseconds with a unit that keeps them readable: `11.5 µs`, `1.70 ms`, `2.1 s`.
pub fn micros(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{} s", digits(v / 1e6)),
        v if v >= 1e3 => format!("{} ms", digits(v / 1e3)),
        v => format!("{} µs", digits(v)),
    }
}

/// Formats a count with a metric suffix: `113 k`, `2.1 M`.
pub fn count(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{} M", digits(v / 1e6)),
        v if v >= 1e4 => format!("{} k", digits(v / 1e3)),
        v => digits(v),
    }
}

/// Formats three significant digits, without an exponent.
pub fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.0995 => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.4}"),
    }
}

/// Parses seconds, from a millisecond to an hour: `0.2`, `5`, `5s`.
///
/// # Errors
///
/// Fails as [`parse_seconds_within`] does.
pub fn parse_seconds(text: &str) -> Result<Duration, ValueError> {
    parse_seconds_within(text, 1e-3..=3600.0)
}

/// Parses seconds within `accepted`: `0.2`, `5`, `5s`.
///
/// # Errors
///
/// Fails if `text` is no number, or out of the range.
pub fn parse_seconds_within(text: &str, accepted: RangeInclusive<f64>) -> Result<Duration, ValueError> {
    let number = text.trim().trim_end_matches('s').trim_end();
    match number.parse::<f64>() {
        Ok(seconds) if accepted.contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => {
            let accepted = format!("seconds from {} to {}", accepted.start(), accepted.end());
            Err(ValueError::number("duration", text, accepted))
        }
    }
}

/// Parses a whole number within `accepted`, which `kind` names in an error.
///
/// # Errors
///
/// Fails if `text` has anything but digits, or is out of the range.
pub fn parse_number(
    kind: &'static str,
    text: &str,
    accepted: RangeInclusive<u64>,
) -> Result<u64, ValueError> {
    match text.parse() {
        Ok(number) if accepted.contains(&number) && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Ok(number)
        }
        _ => {
            let accepted = format!("whole numbers from {} to {}", accepted.start(), accepted.end());
            Err(ValueError::number(kind, text, accepted))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_parsed() {
        for (text, bytes) in [
            ("64", 64),
            ("64B", 64),
            ("4KiB", 4096),
            ("4kib", 4096),
            (" 1 MiB ", 1 << 20),
            ("1GiB", 1 << 30),
            ("0", 0),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn texts_that_are_not_sizes_are_refused() {
        for (text, error) in [
            ("", SizeError::Empty),
            ("  ", SizeError::Empty),
            ("KiB", SizeError::Form),
            ("-1", SizeError::Form),
            ("+1", SizeError::Form),
            ("1.5MiB", SizeError::Form),
            ("4KB", SizeError::Form),
            ("4k", SizeError::Form),
            ("1 000", SizeError::Form),
            ("0x10", SizeError::Form),
            ("١", SizeError::Form),
            ("18446744073709551616", SizeError::Overflow),
            ("17179869184GiB", SizeError::Overflow),
        ] {
            assert_eq!(parse_size(text), Err(error), "{text:?}");
        }
    }

    #[test]
    fn seconds() {
        assert_eq!(parse_seconds("0.2"), Ok(Duration::from_millis(200)));
        assert_eq!(parse_seconds("5s"), Ok(Duration::from_secs(5)));
        for bad in ["", "0", "-1", "nan", "inf", "1e9", "five", "0.0001"] {
            parse_seconds(bad).expect_err(bad);
        }
    }

    #[test]
    fn figures_keep_three_digits() {
        assert_eq!(micros(11.52), "11.5 µs");
        assert_eq!(micros(1_700.0), "1.70 ms");
        assert_eq!(micros(2_100_000.0), "2.10 s");
        assert_eq!(count(113_400.0), "113 k");
        assert_eq!(rough_size(1_605_632), "1.53 MiB");
        assert_eq!(digits(99.96), "100");
        assert_eq!(digits(0.0), "0");
        assert_eq!(digits(0.0123), "0.0123");
    }

    proptest! {
        #[test]
        fn a_size_that_is_written_is_read_back(bytes in any::<u64>(), shift in 0u32..64) {
            let bytes = bytes >> shift;
            prop_assert_eq!(parse_size(&size(bytes)), Ok(bytes));
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text in "\\PC*") {
            let _ = parse_size(&text);
            let _ = parse_seconds(&text);
            let _ = parse_number("number", &text, 0..=9);
        }
    }
}
