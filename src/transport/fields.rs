//! Fields of heads.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};

/// Returns the field `name`, which is in lower case. Heads of calls have a few fields, and comparing their names costs less than the hash
/// of one.
pub(crate) fn field<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a HeaderValue> {
    /// Most fields that are compared.
    const FEW: usize = 8;
    if headers.len() > FEW {
        return headers.get(name);
    }
    headers.iter().find(|(other, _)| other.as_str() == name).map(|(_, value)| value)
}

/// Returns the time in the field `grpc-timeout`: at most 8 digits and a unit (gRPC over HTTP/2). `None` if there is no such field, or if it
/// has something else, which tonic ignores, too.
pub fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    /// Most digits.
    const DIGITS: usize = 8;
    let (unit, digits) = field(headers, "grpc-timeout")?.as_bytes().split_last()?;
    if digits.is_empty() || digits.len() > DIGITS || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = digits.iter().fold(0, |count, digit| count * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        b'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn timeouts_are_read_as_the_specification_writes_them() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            grpc_timeout(&headers)
        };
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("3M"), Some(Duration::from_secs(180)));
        assert_eq!(read("42S"), Some(Duration::from_secs(42)));
        assert_eq!(read("13m"), Some(Duration::from_millis(13)));
        assert_eq!(read("250000u"), Some(Duration::from_millis(250)));
        assert_eq!(read("99999999n"), Some(Duration::from_nanos(99_999_999)));
        assert_eq!(read("0n"), Some(Duration::ZERO));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for wrong in ["", "S", "1", "1s", "-1S", "+1S", "1.5S", "123456789S", "1 S"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
        assert_eq!(grpc_timeout(&HeaderMap::new()), None);
    }

    #[test]
    fn a_field_is_found_among_few_and_among_many() {
        let mut headers = HeaderMap::new();
        for number in 0..20 {
            assert!(field(&headers, "grpc-timeout").is_none());
            headers.append("te", HeaderValue::from(number));
        }
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", HeaderValue::from_static("1S"));
        for number in 0..20 {
            headers.append("grpc-timeout", HeaderValue::from(number));
            headers.append("te", HeaderValue::from(number));
            assert_eq!(field(&headers, "grpc-timeout").unwrap(), "1S", "the first value");
        }
    }
}
