//! Sizes and times as people write them: parsers and formatters.

use std::ops::RangeInclusive;
use std::time::Duration;

pub use tonic_rdma_verbs::unstable::units::{SIZE_FORMS, SizeError, parse_size, size};

use crate::failure::ValueError;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

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

/// Parses a time from a millisecond to an hour: `0.2` and `5` are seconds, `300ms` and `2m` have their own
/// unit.
///
/// # Errors
///
/// Fails as [`parse_time_within`] does.
pub fn parse_time(text: &str) -> Result<Duration, ValueError> {
    parse_time_within(text, 1e-3..=3600.0)
}

/// Parses a time within `accepted`, which is in seconds, as [`parse_time`] does.
///
/// # Errors
///
/// Fails if `text` is no time, or out of the range.
pub fn parse_time_within(text: &str, accepted: RangeInclusive<f64>) -> Result<Duration, ValueError> {
    match tonic_rdma_verbs::unstable::units::parse_time(text, Duration::from_secs(1)) {
        Some(time) if accepted.contains(&time.as_secs_f64()) => Ok(time),
        _ => {
            let (least, most) = (accepted.start(), accepted.end());
            let accepted =
                format!("seconds from {least} to {most}, or a time with a unit, such as 300ms or 2m");
            Err(ValueError::number("time", text, accepted))
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

/// Returns the parser of a whole number within `accepted`, as [`parse_number`] does it, for an option of type
/// `T`.
pub fn number<T: TryFrom<u64>>(
    kind: &'static str,
    accepted: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, ValueError> + Clone {
    move |text| {
        let number = parse_number(kind, text, accepted.clone())?;
        let most = accepted.end();
        T::try_from(number).map_err(|_| ValueError::number(kind, text, format!("whole numbers below {most}")))
    }
}

/// Parses a number within `accepted`, which `kind` names in an error.
///
/// # Errors
///
/// Fails if `text` is no number, or out of the range.
pub fn parse_decimal(
    kind: &'static str,
    text: &str,
    accepted: RangeInclusive<f64>,
) -> Result<f64, ValueError> {
    text.parse().ok().filter(|number| accepted.contains(number)).ok_or_else(|| {
        ValueError::number(kind, text, format!("numbers from {} to {}", accepted.start(), accepted.end()))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times() {
        for (text, millis) in [("0.2", 200), ("5", 5000), ("5s", 5000), ("300ms", 300), ("2m", 120_000)] {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for bad in ["", "0", "-1", "nan", "inf", "1e9", "five", "0.0001", "120us", "2h"] {
            parse_time(bad).expect_err(bad);
        }
    }

    #[test]
    fn numbers_are_within_their_ranges() {
        let text = |error: ValueError| error.to_string();
        assert_eq!(number::<u8>("batch", 1..=64)("64"), Ok(64));
        for bad in ["", "0", "65", "+1", "-1", "1.0"] {
            let expected = format!("bad batch {bad:?}; accepted: whole numbers from 1 to 64");
            assert_eq!(number::<u8>("batch", 1..=64)(bad).map_err(text), Err(expected));
        }
        assert_eq!(parse_decimal("ratio", "0.5", 0.01..=1000.0), Ok(0.5));
        for bad in ["", "0", "1001", "NaN", "inf", "half"] {
            let expected = format!("bad ratio {bad:?}; accepted: numbers from 0.01 to 1000");
            assert_eq!(parse_decimal("ratio", bad, 0.01..=1000.0).map_err(text), Err(expected));
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
        fn no_text_makes_a_parser_panic(text in "\\PC*") {
            let _ = parse_time(&text);
            let _ = parse_number("number", &text, 0..=9);
            let _ = parse_decimal("number", &text, 0.0..=9.0);
        }
    }
}
