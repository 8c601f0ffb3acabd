//! A calibration as text: a line `key=value` for each value, and a checksum at the end.
//!
//! Other programs may have written the file, so a value that can't have been measured is refused.

use std::fmt::Write as _;
use std::time::Duration;

use super::calibration::{Calibration, ChunkPoint, Point};
use super::key::CalibrationKey;

/// The first line, with the version of the format.
const FIRST: &str = "tonic-rdma calibration 1";
/// Longest text, in bytes.
pub(super) const LONGEST: u64 = 16 << 10;

/// The reason why a text is no calibration for a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The first line is not that of this version.
    #[error("it is of another version of the format, or none of ours")]
    Version,
    /// The checksum does not fit.
    #[error("its sum is wrong: it was damaged, or changed by hand")]
    Sum,
    /// A line is missing, or has a value that can't have been measured.
    #[error("line {0:?} is wrong")]
    Line(String),
    /// The calibration was made with another key. The value names the field that differs.
    #[error("it is of another {0}")]
    Key(&'static str),
    /// The points are not in order, or there are none.
    #[error("the sizes are not in order, or there are none")]
    Sizes,
}

/// Returns a calibration as text.
pub(super) fn encode(calibration: &Calibration) -> String {
    let Calibration { key, points, chunks, post_cost, message_cost, round_trip, steady: _ } = calibration;
    let mut text = format!("{FIRST}\n");
    let mut line = |key: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(text, "{key}={value}");
    };
    for (key, value) in key_fields(key) {
        line(key, &value);
    }
    line("post_ns", &post_cost.as_nanos());
    line("message_ns", &message_cost.as_nanos());
    line("round_trip_ns", &round_trip.as_nanos());
    for ChunkPoint { chunk, bytes, rendezvous } in chunks {
        line("chunk", &format!("{chunk} {bytes} {}", rendezvous.as_nanos()));
    }
    for Point { bytes, eager, rendezvous, copying } in points {
        let [eager, rendezvous, copying] = [eager, rendezvous, copying].map(Duration::as_nanos);
        line("size", &format!("{bytes} {eager} {rendezvous} {copying}"));
    }
    let sum = sum(&text);
    let _ = writeln!(text, "sum={sum:016x}");
    text
}

/// Reads a calibration for `key`.
pub(super) fn decode(text: &str, key: &CalibrationKey) -> Result<Calibration, FormatError> {
    let body =
        text.strip_prefix(FIRST).and_then(|rest| rest.strip_prefix('\n')).ok_or(FormatError::Version)?;
    let (body, last) = body.trim_end_matches('\n').rsplit_once('\n').ok_or(FormatError::Sum)?;
    if last != format!("sum={:016x}", sum(&format!("{FIRST}\n{body}\n"))) {
        return Err(FormatError::Sum);
    }
    let mut lines = body.lines().map(|line| line.split_once('=').ok_or(line)).peekable();
    for (key, value) in key_fields(key) {
        match lines.next() {
            Some(Ok((found, text))) if found == key && text == value => {}
            Some(Ok((found, _))) if found == key => return Err(FormatError::Key(key)),
            other => return Err(FormatError::Line(format!("{other:?}"))),
        }
    }
    let mut time = |key: &str| match lines.next() {
        Some(Ok((found, text))) if found == key => {
            parse_times::<1>(text).map(|[time]| time).ok_or_else(|| wrong(key, text))
        }
        other => Err(FormatError::Line(format!("{other:?}"))),
    };
    let (post_cost, message_cost, round_trip) =
        (time("post_ns")?, time("message_ns")?, time("round_trip_ns")?);
    let (mut chunks, mut points) = (Vec::new(), Vec::new());
    for line in lines {
        match line {
            Ok(("chunk", text)) => chunks.push(chunk(text).ok_or_else(|| wrong("chunk", text))?),
            Ok(("size", text)) => points.push(point(text).ok_or_else(|| wrong("size", text))?),
            other => return Err(FormatError::Line(format!("{other:?}"))),
        }
    }
    let ascending = points.windows(2).all(|pair: &[Point]| pair[0].bytes < pair[1].bytes);
    if points.is_empty() || points.len() > 64 || chunks.len() > 64 || !ascending {
        return Err(FormatError::Sizes);
    }
    let key = key.clone();
    Ok(Calibration { key, points, chunks, post_cost, message_cost, round_trip, steady: true })
}

fn key_fields(key: &CalibrationKey) -> [(&'static str, String); 6] {
    let CalibrationKey { provider, device, driver, version, cpu, slot_size } = key.clone();
    [
        ("provider", provider),
        ("device", device),
        ("driver", driver),
        ("version", version),
        ("processor", cpu),
        ("slot size", slot_size.to_string()),
    ]
}

fn point(text: &str) -> Option<Point> {
    let (bytes, times) = text.split_once(' ')?;
    let [eager, rendezvous, copying] = parse_times(times)?;
    let bytes = parse_bytes(bytes).filter(|bytes| bytes.is_power_of_two())?;
    (copying <= rendezvous).then_some(Point { bytes, eager, rendezvous, copying })
}

fn chunk(text: &str) -> Option<ChunkPoint> {
    let (chunk, rest) = text.split_once(' ')?;
    let (bytes, times) = rest.split_once(' ')?;
    let [rendezvous] = parse_times(times)?;
    let chunk = parse_bytes(chunk).filter(|chunk| (4096..=1 << 20).contains(chunk))?;
    Some(ChunkPoint { chunk, bytes: parse_bytes(bytes)?, rendezvous })
}

/// Reads a length within the limits of a measurement.
fn parse_bytes(text: &str) -> Option<usize> {
    text.parse().ok().filter(|bytes| (1024..=64 << 20).contains(bytes))
}

/// Reads times within the limits of a measurement: 1 ns to 10 s.
fn parse_times<const COUNT: usize>(text: &str) -> Option<[Duration; COUNT]> {
    let time = |text: &str| text.parse().ok().filter(|nanos| (1..=10_000_000_000).contains(nanos));
    let times: Option<Vec<Duration>> =
        text.split(' ').map(|text| time(text).map(Duration::from_nanos)).collect();
    times?.try_into().ok()
}

fn wrong(key: &str, value: &str) -> FormatError {
    FormatError::Line(format!("{key}={value}"))
}

/// Returns the FNV-1a checksum, 64 bits. It detects damage, but not a change on purpose.
fn sum(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::calibration::tests::sample;
    use super::*;

    fn calibration() -> Calibration {
        let mut calibration = sample(&[(1024, 1, 9), (65_536, 64, 40), (1 << 22, 4000, 3000)]);
        let rendezvous = Duration::from_micros(123);
        calibration.chunks = vec![ChunkPoint { chunk: 65_536, bytes: 1 << 20, rendezvous }];
        calibration
    }

    /// Returns the text with `from` replaced, and the right checksum.
    fn changed(from: &str, to: &str) -> String {
        let text = encode(&calibration());
        assert!(text.contains(from), "{from:?} in {text}");
        let text = text.replacen(from, to, 1);
        let body = text.split("sum=").next().unwrap();
        format!("{body}sum={:016x}\n", sum(body))
    }

    #[test]
    fn a_calibration_is_read_back() {
        let calibration = calibration();
        let text = encode(&calibration);
        assert_eq!(decode(&text, calibration.key()), Ok(calibration.clone()));
        assert!((text.len() as u64) < LONGEST);
    }

    #[test]
    fn damage_and_impossible_values_are_refused() {
        let key = calibration().key().clone();
        let text = encode(&calibration());
        for (text, error) in [
            (String::new(), FormatError::Version),
            (text.replace("calibration 1", "calibration 2"), FormatError::Version),
            (text[..text.len() / 2].to_owned(), FormatError::Sum),
            (text.replace("64000", "63000"), FormatError::Sum),
            (changed("device=soft0", "device=soft1"), FormatError::Key("device")),
            (changed("version=", "version=9"), FormatError::Key("version")),
            (changed("post_ns=200", "post_ns=0"), FormatError::Line("post_ns=0".into())),
            (changed("size=1024 1000", "size=1024 99999999999"), wrong("size", "1024 99999999999 9000 3000")),
            (changed("size=1024", "size=1023"), wrong("size", "1023 1000 9000 3000")),
            (
                changed("size=1024 1000 9000 3000", "size=1024 1000 9000 9001"),
                wrong("size", "1024 1000 9000 9001"),
            ),
            (changed("chunk=65536", "chunk=1"), wrong("chunk", "1 1048576 123000")),
            (changed("size=1024", "size=65536"), FormatError::Sizes),
        ] {
            assert_eq!(decode(&text, &key), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_refused_without_a_panic(text in "\\PC{0,200}", lines in prop::collection::vec("[a-z_]{0,9}=[0-9 ]{0,30}", 0..12)) {
            let key = calibration().key().clone();
            let _ = decode(&text, &key);
            let body = format!("{FIRST}\n{}\n", lines.join("\n"));
            let text = format!("{body}sum={:016x}\n", sum(&body));
            prop_assert!(decode(&text, &key).is_err());
        }
    }
}
