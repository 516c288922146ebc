package mqd;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.Key;
import java.security.MessageDigest;
import java.util.Arrays;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.zip.GZIPInputStream;
import javax.crypto.AEADBadTagException;
import javax.crypto.Cipher;
import javax.crypto.spec.GCMParameterSpec;
import javax.crypto.spec.SecretKeySpec;

/**
 * Opens values that mqd's clients have sealed (docs/payload-encryption.md, version 1). Needs only the JDK.
 *
 * <p>Supports the codecs of the JDK: none and gzip. For keys that are not in a key file, override
 * {@link #unwrap}. Not thread-safe.
 */
public class SealedValues {
    /** A value cannot be opened; the message has the reason. */
    public static class SealedException extends RuntimeException {
        private static final long serialVersionUID = 1;

        public SealedException(String message) {
            super(message);
        }
    }

    private static final byte[] MAGIC = {(byte) 0xff, 'm', 'q'};
    private static final int VERSION = 1, DIGEST_BYTES = 16, NONCE_BYTES = 12, TAG_BYTES = 16;
    private static final int WRAPPED_BYTES_MAX = 4096, VALUE_BYTES_MAX = 128 << 20, DATA_KEYS_MAX = 1024;
    private static final int GZIP = 1, CODEC_MAX = 4;

    private final Map<String, Key> keys = new LinkedHashMap<>();
    private final Map<ByteBuffer, Key> dataKeys = new LinkedHashMap<>() {
        @Override
        protected boolean removeEldestEntry(Map.Entry<ByteBuffer, Key> eldest) {
            return size() > DATA_KEYS_MAX;
        }
    };

    /** Keys as `mqd key create` writes them: ID:BASE64 in a line, # begins a comment. */
    public SealedValues(String keyFile) {
        for (String line : keyFile.split("\n")) {
            line = line.strip();
            if (line.isEmpty() || line.startsWith("#")) continue;
            int colon = line.lastIndexOf(':');
            byte[] key = Base64.getDecoder().decode(line.substring(colon + 1).strip());
            if (colon < 1 || key.length != 32) throw new IllegalArgumentException("a key is ID:BASE64 of 32 bytes");
            keys.put(line.substring(0, colon), new SecretKeySpec(key, "AES"));
        }
    }

    public static boolean isSealed(byte[] data) {
        return data.length >= MAGIC.length && Arrays.equals(data, 0, MAGIC.length, MAGIC, 0, MAGIC.length);
    }

    /** The value, after checking that it was sealed for this topic and record key (null: no key). */
    public byte[] open(String topic, byte[] recordKey, byte[] data) {
        return open(topic, data, true, recordKey);
    }

    /** The value, without checking that it was sealed for its record key, for callers that do not know the key. */
    public byte[] openWithoutKey(String topic, byte[] data) {
        return open(topic, data, false, null);
    }

    private byte[] open(String topic, byte[] data, boolean checksKey, byte[] recordKey) {
        if (!isSealed(data)) throw new SealedException("it is not sealed");
        try {
            ByteBuffer in = ByteBuffer.wrap(data).position(MAGIC.length);
            int version = in.get() & 0xff;
            if (version != VERSION) throw new SealedException("its envelope has version " + version + ", not 1");
            int codec = in.get() & 0xff, nameStart = in.position();
            byte[] id = new byte[in.get() & 0xff];
            int wrappedBytes = in.getShort() & 0xffff;
            if (codec > CODEC_MAX || id.length == 0 || wrappedBytes < 1 || wrappedBytes > WRAPPED_BYTES_MAX)
                throw new SealedException("its envelope is damaged");
            byte[] wrapped = new byte[wrappedBytes], digest = new byte[DIGEST_BYTES], nonce = new byte[NONCE_BYTES];
            in.get(id).get(wrapped);
            int nameEnd = in.position();
            in.get(digest);
            int known = in.position();
            in.get(nonce);
            if (in.remaining() < TAG_BYTES) throw new SealedException("its envelope is cut off");
            if (checksKey && !Arrays.equals(digest, digestOf(recordKey)))
                throw new SealedException("it was sealed for another record key");

            ByteBuffer name = ByteBuffer.wrap(Arrays.copyOfRange(data, nameStart, nameEnd));
            Key dataKey = dataKeys.get(name);
            if (dataKey == null) {
                dataKey = unwrap(new String(id, StandardCharsets.UTF_8), wrapped);
                dataKeys.put(name, dataKey);
            }
            Cipher cipher = Cipher.getInstance("AES/GCM/NoPadding");
            cipher.init(Cipher.DECRYPT_MODE, dataKey, new GCMParameterSpec(8 * TAG_BYTES, nonce));
            cipher.updateAAD(data, 0, known);
            cipher.updateAAD(topic.getBytes(StandardCharsets.UTF_8));
            byte[] text = cipher.doFinal(data, in.position(), in.remaining());
            return codec == 0 ? text : unpack(codec, text);
        } catch (BufferUnderflowException cut) {
            throw new SealedException("its envelope is cut off");
        } catch (AEADBadTagException changed) {
            throw new SealedException("it was changed, or sealed for another topic");
        } catch (GeneralSecurityException missing) {
            throw new IllegalStateException(missing);
        }
    }

    /** The data key. Throws SealedException when there is no such key. */
    protected Key unwrap(String keyId, byte[] wrapped) {
        Key key = keys.get(keyId);
        if (key == null) throw new SealedException("its key '" + keyId + "' is not among " + keys.keySet());
        try {
            Cipher cipher = Cipher.getInstance("AESWrap");
            cipher.init(Cipher.UNWRAP_MODE, key);
            return cipher.unwrap(wrapped, "AES", Cipher.SECRET_KEY);
        } catch (GeneralSecurityException | RuntimeException wrong) {
            throw new SealedException("the key '" + keyId + "' does not unwrap the data key: the value was changed, or"
                    + " sealed with another key of that id");
        }
    }

    private static byte[] digestOf(byte[] recordKey) throws GeneralSecurityException {
        if (recordKey == null) return new byte[DIGEST_BYTES];
        return Arrays.copyOf(MessageDigest.getInstance("SHA-256").digest(recordKey), DIGEST_BYTES);
    }

    private static byte[] unpack(int codec, byte[] text) {
        if (codec != GZIP)
            throw new SealedException("the JDK does not have codec " + codec + ": set encryption.compression=gzip or none");
        if (text.length < 4) throw new SealedException("it is cut off in the size of the value");
        long size = ByteBuffer.wrap(text).getInt() & 0xffffffffL;
        if (size > VALUE_BYTES_MAX) throw new SealedException("its stated size is " + size + " bytes, above the maximum");
        try (InputStream in = new GZIPInputStream(new ByteArrayInputStream(text, 4, text.length - 4))) {
            byte[] value = in.readNBytes((int) size);
            if (in.read() >= 0) throw new SealedException("its stated size is " + size + " bytes, but it expands to more");
            if (value.length != size)
                throw new SealedException("its stated size is " + size + " bytes, but it decompresses to " + value.length);
            return value;
        } catch (IOException damaged) {
            throw new SealedException("it cannot be decompressed: " + damaged.getMessage());
        }
    }
}
