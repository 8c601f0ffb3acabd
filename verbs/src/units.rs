//! Sizes and times as people write them in variables and options. All packages parse them here.

use std::time::Duration;

/// The forms that [`parse_size()`] accepts, for messages.
pub const SIZE_FORMS: &str = "a number of bytes, or a number with a unit, such as 64k, 4KiB or 8GiB";

/// The reason why a text is not a size.
#[expect(missing_docs, reason = "the texts say what each is")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("it has no number")]
    Empty,
    #[error("the number or the unit can't be read")]
    Form,
    #[error("it is a fraction of a byte")]
    Fraction,
    #[error("it is beyond what 64 bits hold")]
    Overflow,
}

/// Parses a number of bytes: `64`, `64k`, `4KiB`, `1.5 GB`. Units are binary, with and without an `i`: `k`,
/// `K`, `Ki`, `KB` and `KiB` are 1024.
///
/// # Errors
/// `text` has no number, an unknown unit, a fraction of a byte, or more than 64 bits hold.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    const BINARY: parse_size::Config = parse_size::Config::new().with_binary();
    let text = text.replace(['_', ' '], "");
    let text = text.trim();
    let is_digit = |byte: &u8| byte.is_ascii_digit();
    let number = text.strip_suffix(['b', 'B']).unwrap_or(text);
    if !number.is_empty() && number.bytes().all(|byte| is_digit(&byte)) {
        return number.parse().map_err(|_| SizeError::Overflow);
    }
    // `parse_size` has an overflow of its own at 20 digits.
    if number.bytes().filter(is_digit).count() > 19 {
        return Err(SizeError::Overflow);
    }
    let bytes = BINARY.parse_size(text).map_err(|error| match error {
        parse_size::Error::Empty => SizeError::Empty,
        parse_size::Error::PosOverflow => SizeError::Overflow,
        _ => SizeError::Form,
    })?;
    // Fractions of a unit are rounded to bytes.
    let is_fraction = number.parse::<f64>().is_ok_and(|number| number.fract() > 0.0);
    let is_lost = bytes == 0 && number.bytes().any(|byte| matches!(byte, b'1'..=b'9'));
    if is_fraction || is_lost { Err(SizeError::Fraction) } else { Ok(bytes) }
}

/// Formats `bytes` in the largest unit that divides it: `64 B`, `4 KiB`, `1 GiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = if bytes == 0 { 0 } else { (bytes.trailing_zeros() as usize / 10).min(UNITS.len() - 1) };
    format!("{} {}", bytes >> (10 * unit), UNITS[unit])
}

/// Parses a time with a unit, such as `120us`, `300ms`, `1.5s`, `2m` or `1h 30m`, or a number of `unit`.
/// Returns `None` if `text` is neither.
pub fn parse_time(text: &str, unit: Duration) -> Option<Duration> {
    let text = text.trim();
    match text.parse::<f64>() {
        Ok(number) => Duration::try_from_secs_f64(number * unit.as_secs_f64()).ok(),
        Err(_) => parse_spans(text),
    }
}

/// Adds up the spans of a time such as `1h 30m`. `humantime` would panic if their sum is too large.
fn parse_spans(text: &str) -> Option<Duration> {
    let (mut sum, mut rest) = (Duration::ZERO, text);
    loop {
        let unit = rest.find(char::is_alphabetic)?;
        let length = rest[unit..].find(|letter: char| !letter.is_alphabetic());
        let (span, others) = rest.split_at(length.map_or(rest.len(), |length| unit + length));
        sum = sum.checked_add(humantime::parse_duration(span).ok()?)?;
        rest = others.trim_start();
        if rest.is_empty() {
            return Some(sum);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_parsed() {
        for (texts, bytes) in [
            (&["64", "64B", "64b", " 64 "][..], 64),
            (&["4096", "4k", "4K", "4Ki", "4KiB", "4kib", "4KB", "4kb", " 4 KiB "], 4096),
            (&["1M", "1m", "1MiB", "1MB", "1024k", "1048576"], 1 << 20),
            (&["8GiB", "8G", "8gb"], 8 << 30),
            (&["1TiB", "1T"], 1 << 40),
            (&["1.5MiB", "1.5M"], 3 << 19),
            (&["0"], 0),
            (
                &[
                    "18446744073709551615",
                    "18446744073709551615 B",
                    "000000000000000000018446744073709551615",
                ],
                u64::MAX,
            ),
            (&["1e3", "1_000", "1 000", "1000.0"], 1000),
        ] {
            for text in texts {
                assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
            }
        }
    }

    #[test]
    fn texts_that_are_not_sizes_are_refused() {
        for (texts, error) in [
            (&["", "  ", "KiB", "B"][..], SizeError::Empty),
            (&["-1", "4 apples", "4KiBB", "0x10", "1,5k", "٣", "k4", "5s"], SizeError::Form),
            (
                &[
                    "18446744073709551616",
                    "17179869184GiB",
                    "184467440737095516159",
                    "184467440737095516159k",
                    "18446744073709551615.9",
                    "18446744073709551615.9k",
                    "1e20",
                ],
                SizeError::Overflow,
            ),
            (&["0.4", "1.5", "1.5 B", "5e-1", "1_0.5", "0.0001k"], SizeError::Fraction),
        ] {
            for text in texts {
                assert_eq!(parse_size(text), Err(error), "{text:?}");
            }
        }
    }

    #[test]
    fn times_are_parsed() {
        let micro = Duration::from_micros(1);
        for (text, micros) in [
            ("120", 120),
            ("120us", 120),
            ("120µs", 120),
            ("300ms", 300_000),
            (" 1.5 s ", 1_500_000),
            ("5s", 5_000_000),
            ("2m", 120_000_000),
            ("1h", 3_600_000_000),
            ("1h 30m", 5_400_000_000),
            ("1h30m1.5s", 5_401_500_000),
            ("1 min 2 sec", 62_000_000),
            ("1000000000ns", 1_000_000),
            ("0", 0),
        ] {
            assert_eq!(parse_time(text, micro), Some(Duration::from_micros(micros)), "{text:?}");
        }
        assert_eq!(parse_time("0.2", Duration::from_secs(1)), Some(Duration::from_millis(200)));
        for bad in [
            "",
            "-1",
            "-1s",
            "nan",
            "inf",
            "1e300",
            "five",
            "5 apples",
            "4KiB",
            "1s 5",
            "1s -5s",
            "1s,",
            "18446744073709551616s",
            "18446744073709551615s 1000ms",
            "584542046090y 19767615s 1000ms",
        ] {
            assert_eq!(parse_time(bad, micro), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn a_size_that_is_written_is_read_back(bytes in any::<u64>(), shift in 0u32..64) {
            let bytes = bytes >> shift;
            prop_assert_eq!(parse_size(&size(bytes)), Ok(bytes));
        }

        #[test]
        fn no_text_makes_the_parsers_panic(
            text in prop_oneof![
                "\\PC*",
                "(18446744073709551615|[0-9]{15,25})[0-9]?([.][0-9]{0,25})? ?([kMGTPE]i?)?B?",
                "((18446744073709551615|[0-9]{1,25})([.][0-9]{1,25})? ?(ns|us|ms|s|m|h|d|w|M|y) ?){1,4}",
            ]
        ) {
            let _ = parse_size(&text);
            let _ = parse_time(&text, Duration::from_secs(1));
        }
    }
}
