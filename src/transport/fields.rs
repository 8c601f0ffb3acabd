//! Fields of heads.

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

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
